"""Free ports of this machine for tasks that start a little later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 10_000
_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_START: Final = 32_768
_MAX_TRIES: Final = 1_000


def quiet_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns different ports that nobody uses, and that the system gives nobody by itself.

    A port that was free a moment ago, among those that the system deals out, may be another
    process' when its task starts: Ray alone takes some dozens.
    """
    candidates = random.sample(range(_LOWEST, _first_dealt_out()), _MAX_TRIES)
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in candidates:
            if len(ports) == count:
                break
            # One at a time; all are held until the last is found.
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server((host, port)))
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"{host}: of {_MAX_TRIES} ports, {len(ports)} are free; {count} are needed.")
    return ports


def _first_dealt_out() -> int:
    """Returns the lowest port that the system may give a process that asks for any."""
    try:
        first = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError):
        return _DEFAULT_START
    return first if first >= _LOWEST + _MAX_TRIES else _DEFAULT_START

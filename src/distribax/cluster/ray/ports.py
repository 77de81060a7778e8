"""Free ports of this machine, for tasks that start a little later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_LOWEST: Final = 10_000
_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_START: Final = 32_768
_MAX_TRIES: Final = 1_000


def find_quiet_ports(count: int, host: str = _LOOPBACK) -> list[int]:
    """Returns different ports that no process uses, and that the system assigns to nobody.

    A port from the range that the system assigns may be free now and taken when its task starts:
    Ray alone uses dozens of them.

    Args:
        count: How many ports.
        host: The address on which they must be free.

    Returns:
        The ports.

    Raises:
        OSError: There are not enough free ports.
    """
    candidates = random.sample(range(_LOWEST, _find_first_assigned()), _MAX_TRIES)
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in candidates:
            if len(ports) == count:
                break
            # All ports are held until the last one is found, so that they differ.
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server((host, port)))
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"{host}: of {_MAX_TRIES} ports, {len(ports)} are free; {count} are needed.")
    return ports


def _find_first_assigned() -> int:
    """Returns the lowest port that the system may assign to a process that asks for any port."""
    try:
        first = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError):
        return _DEFAULT_START
    return first if first >= _LOWEST + _MAX_TRIES else _DEFAULT_START

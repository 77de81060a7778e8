"""Free ports of this machine, for tasks that start a little later."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_LOWEST: Final = 10_000
_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_START: Final = 32_768
_MAX_TRIES: Final = 1_000
_MAX_RESERVED: Final = 64
"""How many ports a process reserves; the tasks of earlier ones have started, or never will."""

_reserved: deque[int] = deque()
"""Sockets by whose names other processes know which ports tasks of this one will use.

They are kept as bare descriptors, since the end of the process is what should close them: Python
would warn of each socket object that is still open then.
"""


def find_quiet_ports(count: int, host: str = _LOOPBACK) -> list[int]:
    """Returns different ports that no process uses, and that the system assigns to nobody.

    A port from the range that the system assigns may be free now and taken when its task starts:
    Ray alone uses dozens of them. On Linux, other programs that call this function at the same time
    get other ports.

    Args:
        count: How many ports.
        host: The address on which they must be free.

    Returns:
        The ports.

    Raises:
        OSError: There are not enough free ports.
    """
    # Of its own: programs that set the seed of the common one would all try the same ports.
    chance = random.SystemRandom()
    candidates = chance.sample(range(_LOWEST, _find_first_assigned()), _MAX_TRIES)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            _reserve(port)
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"{host}: of {_MAX_TRIES} ports, {len(ports)} are free; {count} are needed.")
    return ports


def _reserve(port: int) -> None:
    """Keeps other processes from choosing a port; raises an OSError if another one has it."""
    if sys.platform != "linux":
        return
    reserved = socket.socket(socket.AF_UNIX)
    try:
        reserved.bind(f"\0distribax-port-{port}")
    except OSError:
        reserved.close()
        raise
    _reserved.append(reserved.detach())
    if len(_reserved) > _MAX_RESERVED:
        os.close(_reserved.popleft())


def read_assigned_ports() -> tuple[int, int] | None:
    """Returns the first and the last port that the system assigns to those who ask for any port.

    Returns:
        The ports; None where the system does not tell.
    """
    try:
        first, last = map(int, _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return None
    return first, last


def _find_first_assigned() -> int:
    first, _ = read_assigned_ports() or (0, 0)
    return first if first >= _LOWEST + _MAX_TRIES else _DEFAULT_START

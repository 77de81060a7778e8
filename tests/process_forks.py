"""The servers whose forks take the place of processes that tests, Ray and launchers start."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

VARIABLE = "DISTRIBAX_TEST_FORKS"
"""Where the processes of a Ray node find a server; if it is empty, they are started as usual."""

WITHOUT = {VARIABLE: ""}
"""For a program whose Ray starts its processes itself, as the program's descendants."""

WITH_WORKERS = {"DISTRIBAX_TEST_FORK_WORKERS": "1"}
"""For a launcher whose workers are forks, too: not if the test is about starting or ending them."""

_NUM_SERVERS = 2
"""Processes of one cluster come from several servers: the order of a set differs in them."""
_START_SECONDS = 300.0
_POLL_SECONDS = 0.02

_ROOT = Path(__file__).parents[1]
_STARTUP = str(_ROOT / "tests" / "startup")
_name = ""


def start_servers() -> None:
    """Starts servers for this process and all that it starts, unless its parent has some."""
    global _name
    if VARIABLE in os.environ or sys.platform != "linux":
        _name = os.environ.get(VARIABLE, "")
        return
    _name = f"distribax-tests-{uuid.uuid4().hex}"
    paths = [_STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for number in range(_NUM_SERVERS):
        _start_server(_make_address(number))
    os.environ[VARIABLE] = _name


def _make_address(number: int) -> str:
    """Returns the address of a server; that of the first one is the name which others know."""
    return f"{_name}-{number}" if number else _name


def _start_server(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alarm:
        alarm.bind(f"\0{address}-alarm")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.process_server", str(alarm.fileno()), address],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[alarm.fileno()],
        )
    atexit.register(server.communicate)


def wake_server(number: int = 0) -> None:
    """Has a server get ready, which takes four seconds of processor time, if it is not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alarm, contextlib.suppress(OSError):
        alarm.sendto(b"wake", f"\0{_make_address(number)}-alarm")


def connect(number: int) -> socket.socket:
    """Returns a connection with a server, which makes one fork.

    Args:
        number: Which of several processes of a cluster the fork will be.
    """
    number %= _NUM_SERVERS
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + _START_SECONDS
    while connection.connect_ex(f"\0{_make_address(number)}"):
        assert time.monotonic() < deadline, "there is no server whose forks are tests' processes"
        wake_server(number)
        time.sleep(_POLL_SECONDS)
    return connection

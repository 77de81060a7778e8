"""Processes that others start, as Ray does, but that are forks of one that has imported JAX."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

VARIABLE = "DISTRIBAX_TEST_FORKS"
"""Where the processes of a Ray node find the server; if it is empty, they are started as usual."""

WITHOUT = {VARIABLE: ""}
"""For a program whose Ray starts its processes itself, as the program's descendants."""

WITH_WORKERS = {"DISTRIBAX_TEST_FORK_WORKERS": "1"}
"""For a launcher whose workers are forks, too: not if the test is about starting or ending them."""

_ROOT = Path(__file__).parents[1]
_STARTUP = str(_ROOT / "tests" / "startup")


def start_server() -> None:
    """Starts a server for this process and all that it starts, unless its parent has one."""
    if VARIABLE in os.environ or sys.platform != "linux":
        return
    name = f"distribax-tests-{uuid.uuid4().hex}"
    paths = [_STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alarm:
        alarm.bind(f"\0{name}-alarm")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.process_server", str(alarm.fileno()), name],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[alarm.fileno()],
        )
    os.environ[VARIABLE] = name
    atexit.register(server.communicate)


def wake_server() -> None:
    """Has the server get ready, which takes five seconds of processor time, if it is not."""
    if not (name := os.environ.get(VARIABLE)):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alarm, contextlib.suppress(OSError):
        alarm.sendto(b"wake", f"\0{name}-alarm")

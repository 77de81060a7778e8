"""Lets a fork of a process that has imported JAX take the place of a Python that others start.

Every Python that tests start imports this module, because its folder is in `PYTHONPATH`
(`tests/process_forks.py`). It does something in the processes of a Ray node, and in workers of
`distribax run` if the test wants that: there, a fork does what this process would have done. It
does nothing if the server is not ready or refuses, or cannot be reached, as from another network
namespace.
"""

from __future__ import annotations

import os
import sys

_RAY = (
    "ray/_private/workers/setup_worker.py",
    "ray/dashboard/agent.py",
    "ray/_private/runtime_env/agent/main.py",
)
_WORKER = "distribax/cli/worker_main.py"
_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP")


def _find_script() -> int | None:
    """Returns where the script that a fork is to run is on the command line."""
    scripts = (*_RAY, _WORKER) if os.environ.get("DISTRIBAX_TEST_FORK_WORKERS") else _RAY
    places = range(1, min(3, len(sys.orig_argv)))
    return next((place for place in places if sys.orig_argv[place].endswith(scripts)), None)


def _become_fork(address: str, script: int) -> None:
    """Ends this process with the fork that takes its place; returns if there is none."""
    import json
    import signal
    import socket

    arguments = sys.orig_argv[script:]
    # The worker's second argument is the descriptor of its connection with the launcher.
    more = [int(arguments[1])] if arguments[0].endswith(_WORKER) else []
    descriptors = [0, 1, 2, *more]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(address)
        except OSError:
            _wake(address)
            return
        try:
            socket.send_fds(server, [json.dumps(request).encode()], descriptors)
            fork = int(server.recv(16))
        except (OSError, ValueError):
            return
        for descriptor in more:
            os.close(descriptor)
        for name in _FORWARDED:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(fork, number))
        code = int(server.recv(16))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _wake(address: str) -> None:
    """Has the server get ready for the next processes."""
    import contextlib
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as alarm, contextlib.suppress(OSError):
        alarm.sendto(b"wake", f"{address}-alarm")


if os.environ.get("DISTRIBAX_TEST_FORKS") and (place := _find_script()) is not None:
    _become_fork("\0" + os.environ["DISTRIBAX_TEST_FORKS"], place)

"""Runs a worker's script as `python script` or `python -m module` would, and reports failures.

A worker that fails does not end at once: at exit, JAX waits for the other workers, which wait for
this one. So the launcher is told of the failure before the exit begins. If the launcher is killed,
its end of the connection closes, and the worker ends, too.

The launcher starts this file by its path. It imports nothing of distribax, so that the script
decides what is imported, and in which order.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types


def _watch_launcher(launcher: socket.socket) -> None:
    """Ends this process and those it has started when the launcher is gone."""
    with contextlib.suppress(OSError):
        while launcher.recv(64):
            pass
    # The launcher has created a process group for this worker alone.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _run_script(script: str) -> None:
    """Runs the script as the module `__main__`."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    with open(script, "rb") as file:
        source = file.read()
    exec(compile(source, script, "exec"), main.__dict__)


def _strip_own_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


def _get_exit_code(error: SystemExit) -> int:
    """Returns the code with which Python ends for a SystemExit."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def main() -> None:
    """Runs the script on the command line, which follows the launcher's file descriptor."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    launcher.set_inheritable(False)
    is_module = sys.argv[2] == "-m"
    sys.argv = sys.argv[3:] if is_module else sys.argv[2:]
    script = sys.argv[0]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    threading.Thread(
        target=_watch_launcher, args=(launcher,), name="launcher-watch", daemon=True
    ).start()
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _run_script(script)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        _leave(launcher, _get_exit_code(error))
    except BaseException as error:
        trace = _strip_own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _leave(launcher, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _leave(launcher: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code:
        with contextlib.suppress(OSError):
            # The clock of the machine: it tells which of several workers failed first.
            launcher.sendall(f"{code} {time.monotonic_ns()}\n".encode())
    sys.exit(code)


if __name__ == "__main__":
    main()

"""A process that has imported JAX and forks: each fork runs a program as a fresh Python would.

`tests/forked.py` starts it and asks it. It has one thread while it forks, and JAX has not started
in it, so that nothing which a fork would break is there. A fork leaves the server's loop and runs
its program at the top of the stack: it ends as any Python process does, with its exit functions.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

from tests.lowering import share_contexts
from tests.memory import collect_seldom, freeze

MODULES = (
    "numpy",
    "jax.numpy",
    "jaxlib.mlir.dialects.mhlo",
    "optax",
    "orbax.checkpoint",
    "distribax",
    "distribax.data.execution.pipeline",
)
"""What nearly all programs of the tests import; together more than a second of processor time."""

_LONGEST_REQUEST = 1 << 20
_NUM_DESCRIPTORS = 4


@dataclass
class _Server:
    """The requests that come through a socket, and the children that run."""

    requests: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    # By the child's pidfd: its process id, and where its exit code is to be written.
    children: dict[int, tuple[int, int]] = field(default_factory=dict)

    def serve(self) -> dict[str, Any] | None:
        """Forks as asked; returns what to run in a child, and None in the server at its end."""
        self.selector.register(self.requests, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fd != self.requests.fileno():
                    self._reap(key.fd)
                    continue
                data, descriptors, _, _ = socket.recv_fds(
                    self.requests, _LONGEST_REQUEST, _NUM_DESCRIPTORS
                )
                if not data:
                    self._end_children()
                    return None
                request: dict[str, Any] = json.loads(data)
                *standard, status = descriptors
                if self._fork(standard, status):
                    return request

    def _fork(self, standard: list[int], status: int) -> bool:
        """Returns whether this is the child, which has these standard streams."""
        pid = os.fork()
        if pid:
            pidfd = os.pidfd_open(pid)
            self.children[pidfd] = (pid, status)
            self.selector.register(pidfd, selectors.EVENT_READ)
            for descriptor in standard:
                os.close(descriptor)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))
            self.requests.sendmsg([str(pid).encode()], [rights])
            return False
        self.selector.close()
        self.requests.close()
        for pidfd, (_, other) in self.children.items():
            os.close(pidfd)
            os.close(other)
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(status)
        return True

    def _reap(self, pidfd: int) -> None:
        pid, status = self.children.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(pidfd)
        os.close(pidfd)
        with open(status, "w") as pipe:
            pipe.write(str(code))

    def _end_children(self) -> None:
        for pidfd in self.children:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def main() -> None:
    """Serves through the socket that the argument is the descriptor of."""
    # Ctrl-C in a terminal reaches this process too; whoever has started it decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in MODULES:
        importlib.import_module(name)
    share_contexts()
    collect_seldom()
    freeze()
    with warnings.catch_warnings():
        # JAX warns of forks: threads that it starts later do not exist here yet.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        request = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        _run(request)


def _run(request: dict[str, Any]) -> None:
    """Runs a program as the main module of this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # Of another TMPDIR, if somebody has asked for it.
    sys.argv = request["arguments"]
    del sys.path[0]  # The folder of the tests.
    program = types.ModuleType("__main__")
    program.__file__ = name = sys.argv[0]
    sys.modules["__main__"] = program
    exec(compile(request["source"], name, "exec"), program.__dict__)


if __name__ == "__main__":
    main()

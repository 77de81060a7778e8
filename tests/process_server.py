"""A process that has imported JAX and Keras, and forks: a fork runs as a fresh Python would.

It has one thread while it forks, and JAX has not started in it, so that nothing which a fork would
break is there. A fork leaves the server's loop and runs its program at the top of the stack: it
ends as any Python process does, with its exit functions.

There are two kinds of programs: those of tests (`tests/forked.py`), and scripts that others start.
To start a worker, Ray starts two Pythons, one after the other, which both import Ray; then the
worker imports JAX. That takes three seconds of processor time, and a fork a tenth of that. A worker
of `distribax run` takes two seconds, and two more if it imports Keras. The Python that was started
(`tests/startup`) waits for the end of its fork, and forwards signals. When it is killed, its fork
is, too. Ray learns a worker's process id from the worker itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import importlib.util
import io
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

from tests.memory import collect_seldom, freeze

_MODULES = (
    "numpy",
    "jax.numpy",
    "jaxlib.mlir.dialects.mhlo",
    "optax",
    "orbax.checkpoint",
    "distribax.coordinator.worker",
    "distribax.data.runtime.pipeline",
    "distribax.parameter_server.actor",
    # What Ray imports. Ray itself reads variables when it is loaded: each fork does that.
    "aiohttp.web",
    "jsonschema",
    "kubernetes.config",
    "psutil",
    "pyarrow.json",
    "pydantic.fields",
    "pydantic.v1",
    "requests",
    "yaml",
)
_READ_BY_IMPORTS = ("PYTHON", "JAX_")
_READ_BY_KERAS = "KERAS_"
_READ_LATER = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SETTINGS = {"JAX_PLATFORMS": str, "JAX_NUM_CPU_DEVICES": int}
"""Variables of JAX that a fork heeds all the same."""
_LONGEST_REQUEST = 1 << 20
_MOST_DESCRIPTORS = 4
_MOST_WAITING = 128
_FREE_DESCRIPTORS = 500
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Task:
    """What a fork has to run.

    Attributes:
        arguments: The script, and its arguments.
        environment: All variables; what is read by imports has to be as in the server.
        folder: The working directory.
        descriptors: The numbers that the descriptors which come with this have in the fork.
        source: The program of a test; its first argument is only a name then.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    source: str | None = None


@dataclass
class _Server:
    """The processes that wait for their forks; the tables have the descriptors of connections."""

    listener: socket.socket
    owner: int
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    connections: dict[int, socket.socket] = field(default_factory=dict)
    # The process ids of the forks, and descriptors of them.
    forks: dict[int, tuple[int, int]] = field(default_factory=dict)

    def serve(self) -> _Task | None:
        """Forks as asked; returns what to run in a fork, and None in the server at its end."""
        self._watch(self.listener.fileno(), self._accept)
        self.selector.register(self.owner, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is not key:
                    continue  # What came before it has closed this one, too.
                if key.fd == self.owner:
                    return None
                react: Callable[[], _Task | None] = key.data
                if task := react():
                    return task

    def _watch(self, descriptor: int, react: Callable[[], _Task | None]) -> None:
        self.selector.register(descriptor, selectors.EVENT_READ, react)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        key = connection.fileno()
        self.connections[key] = connection
        self._watch(key, lambda: self._hear(key))

    def _hear(self, key: int) -> _Task | None:
        """Reads a request, or that the process which waits for a fork has ended."""
        connection = self.connections[key]
        data, received, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, _MOST_DESCRIPTORS)
        if key in self.forks:
            signal.pidfd_send_signal(self.forks[key][1], signal.SIGKILL)
            self.selector.unregister(key)
            return None
        task = _read_task(data) if data else None
        if task is None:
            answer = "only a fresh Python does this as it should"
        elif unlike := _find_unlike(task.environment):
            answer = f"read by imports, and not as in the server of forks: {unlike}"
        elif self._fork(key, dict(zip(task.descriptors, received, strict=True))):
            return task
        else:
            answer = ""
        for descriptor in received:
            os.close(descriptor)
        if answer:
            with contextlib.suppress(OSError):
                connection.send(answer.encode())
            self._forget(key)
        return None

    def _fork(self, key: int, descriptors: Mapping[int, int]) -> bool:
        """Returns whether this is the fork, which has these descriptors and none of the server."""
        if pid := os.fork():
            pidfd = os.pidfd_open(pid)
            self.forks[key] = pid, pidfd
            self._watch(pidfd, lambda: self._reap(key))
            with contextlib.suppress(OSError):
                socket.send_fds(self.connections[key], [str(pid).encode()], [pidfd])
            return False
        self.selector.close()
        self.listener.close()
        for connection in self.connections.values():
            connection.close()
        for _, pidfd in self.forks.values():
            os.close(pidfd)
        os.close(self.owner)
        moved = {
            number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE_DESCRIPTORS)
            for number, descriptor in descriptors.items()
        }
        for descriptor in descriptors.values():
            os.close(descriptor)
        for number, descriptor in moved.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        return True

    def _reap(self, key: int) -> None:
        pid, pidfd = self.forks.pop(key)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(OSError):  # The process that waited has been killed.
            self.connections[key].send(str(code).encode())
        self._forget(key)

    def _forget(self, key: int) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(key)
        self.connections.pop(key).close()


def _read_task(data: bytes) -> _Task | None:
    """Returns what to run; None for what only a fresh Python does as it should."""
    task = _Task(**json.loads(data))
    if task.arguments[0].endswith("setup_worker.py"):
        # It sets variables, and starts what follows in its arguments.
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context", default="{}")
        parser.add_argument("--language")
        known, arguments = parser.parse_known_args(task.arguments[1:])
        context = json.loads(known.serialized_runtime_env_context)
        variables = context.pop("env_vars", {})
        if context.pop("py_executable", sys.executable) != sys.executable or any(context.values()):
            return None
        task = replace(task, arguments=arguments, environment=task.environment | variables)
    return task


def _find_unlike(environment: Mapping[str, str]) -> str:
    """Returns the variables that are not as here, of those that are read by imports."""
    return ", ".join(sorted(filter(_is_read_by_imports, _compare(environment))))


def _is_read_by_imports(variable: str) -> bool:
    if variable in _READ_LATER or variable in _SETTINGS:
        return False
    # distribax reads its time limits then.
    is_time_limit = variable.startswith("DISTRIBAX_") and variable.endswith("_SECONDS")
    return is_time_limit or variable.startswith(_READ_BY_IMPORTS)


def _compare(environment: Mapping[str, str]) -> set[str]:
    """Returns the names of the variables that are not as here."""
    return {name for name, _ in environment.items() ^ os.environ.items()}


class _HiddenKeras(MetaPathFinder, Loader):
    """Keras has been imported, but looks as if it were not until the program imports it."""

    def __init__(self) -> None:
        package = importlib.import_module("keras")
        self._spec, self._loader = package.__spec__, package.__loader__
        names = [name for name in sys.modules if name.partition(".")[0] == "keras"]
        self._modules = {name: sys.modules.pop(name) for name in names}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how to import Keras."""
        return ModuleSpec(fullname, self, is_package=True) if fullname == "keras" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Brings all modules of Keras back."""
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        return self._modules["keras"]

    def exec_module(self, module: types.ModuleType) -> None:
        """Does not execute Keras, which was done when it was imported first."""
        module.__spec__, module.__loader__ = self._spec, self._loader


def _import_modules() -> None:
    """Imports what the forks need; only then, because most runs of tests need no fork."""
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("tests.lowering").share_contexts()
    finders = sys.meta_path[:]
    if importlib.util.find_spec("keras"):
        finders.insert(-1, _HiddenKeras())
    # distribax waits for Keras there, and has to see it once more.
    sys.meta_path[:] = finders
    collect_seldom()
    freeze()


def main() -> None:
    """Serves at an address; the descriptor of a socket, on which it is woken, comes first.

    The end of the standard input ends the server, and with it all of its forks.
    """
    # Ctrl-C in a terminal reaches this process too; whoever has started it decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as alarm:
        if 0 in select.select([alarm, 0], [], [])[0]:
            return
    _import_modules()
    # Not earlier: who comes before this one is ready does not wait for it.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + sys.argv[2])
        listener.listen(_MOST_WAITING)
        with warnings.catch_warnings():
            # JAX warns of forks: threads that it starts later do not exist here yet.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
            task = _Server(listener, os.dup(0)).serve()
    if task is not None:
        _run(task)


def _run(task: _Task) -> None:
    """Runs a program as the main module of this process, which ends with the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if any(name.startswith(_READ_BY_KERAS) for name in _compare(task.environment)):
        # The program will import Keras itself.
        sys.meta_path[:] = [it for it in sys.meta_path if not isinstance(it, _HiddenKeras)]
    os.environ.clear()
    os.environ.update(task.environment)
    for name, kind in _SETTINGS.items():
        if name in os.environ:
            importlib.import_module("jax").config.update(name.lower(), kind(os.environ[name]))
    tempfile.tempdir = None  # Of another TMPDIR, if somebody has asked for it.
    os.chdir(task.folder)
    sys.argv = task.arguments
    name = sys.argv[0]
    if task.source is not None:
        del sys.path[0]  # The folder of the tests.
        code = compile(task.source, name, "exec")
    else:
        sys.path[0] = os.path.dirname(name)
        with open(name, "rb") as file:
            code = compile(file.read(), name, "exec")
        # As with the option -u, which all of these scripts are started with.
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    program = types.ModuleType("__main__")
    program.__file__ = name
    sys.modules["__main__"] = program
    exec(code, program.__dict__)


if __name__ == "__main__":
    main()

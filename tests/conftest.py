"""Eight virtual CPU devices for all tests, and a check that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import hypothesis
import jax
import pytest

from distribax import context, topology
from tests import environment as environment_of_tests
from tests import forked, memory, process_forks

environment_of_tests.prepare()
memory.collect_seldom()
process_forks.start_servers()
# Leaving JAX's frames out of the traceback of each expected error takes a thirtieth of the time.
jax.config.update("jax_traceback_filtering", "off")

# A process that tests/multiprocess has made a worker of a cluster has its devices already.
if not jax.distributed.is_initialized():
    topology.set_virtual_cpu_devices(8)
    # Starts the backend now, with these devices: no test can be the one that happens to start it.
    topology.resolve_devices()

# A busy machine is slow at everything; that is no failure.
_PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("patient", _PATIENT)
hypothesis.settings.load_profile("patient")

_GRACE_SECONDS = 60.0
"""How long a thread or process that has been told to end may take to do so."""

_TEST_RUNNER_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "COLUMNS", "LINES"})
# Of Keras and torch, when they are imported.
_LIBRARY_VARIABLES = frozenset(
    {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TF_FORCE_GPU_ALLOW_GROWTH"}
)

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python starts once and keeps for the life of the test process."""

_LONGEST_LIST = 1 << 16
"""So many bytes are read of the list of a thread's children."""

_TESTS = Path(__file__).parent
_ON_RAY = (
    "multiprocess/coordinator",
    "multiprocess/parameter_server",
    "seeds/test_004_coordinator.py",
)
"""Folders and files that share a Ray cluster, which takes seconds to start."""
_PAGE_ON_RAY = "docs/guide/parameter_server.md"
"""The page whose code uses that cluster too."""
_SLOW_IMPORTS = ("keras", "nnx")
"""Words in the paths of tests that import a library which takes seconds to import."""

_ORDER = (
    "multiprocess/contract",
    # It wants a process without Ray, which the folders above keep until the end.
    "multiprocess/test_server_errors.py",
    "multiprocess/coordinator",
    "multiprocess/test_keras_workers.py",
    "multiprocess",
    "docs",
    "multidevice",
)
"""Slow tests first, so that at the end no process waits for another one."""
_WAITING = "multiprocess"
"""The folder whose tests often wait for processes, with the cores idle."""
_NUM_FIRST = 4
"""So many groups with tests that wait come first: the longest ones."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps together what shares costly fixtures and compiled programs, if there are processes.

    A group of tests is given to one process, the slow ones first, so that at the end no process
    waits for another one. Groups that wait and groups that compute take turns, so that the cores
    are neither idle nor wanted by all processes at once.
    """
    items.sort(key=lambda item: _find_place(item.path, _ORDER))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        group = _find_group(item)
        item.add_marker(pytest.mark.xdist_group(group))
        groups.setdefault(group, []).append(item)
    waiting = [own for own in groups.values() if own[0].path.is_relative_to(_TESTS / _WAITING)]
    computing = [own for own in groups.values() if own not in waiting]
    first, later = waiting[:_NUM_FIRST], waiting[_NUM_FIRST:]
    turns = sorted([*_number(later), *_number(computing)], key=lambda turn: turn[0])
    items[:] = [item for own in (*first, *(own for _, own in turns)) for item in own]


def _number(groups: list[list[pytest.Item]]) -> list[tuple[float, list[pytest.Item]]]:
    """Returns groups with their places, from 0 to 1: those of two lists can be put together."""
    return [(place / len(groups), own) for place, own in enumerate(groups)]


def _find_group(item: pytest.Item) -> str:
    """Returns what a test shares: a Ray cluster, the import of a library, or only its file."""
    if _find_place(item.path, _ON_RAY) < len(_ON_RAY) or _PAGE_ON_RAY in item.name:
        return "Ray"
    path = str(item.path.relative_to(_TESTS))
    return next((library for library in _SLOW_IMPORTS if library in path), path)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepares what tests share.

    In runs of tests that kill processes or take long, Ray starts all of its processes itself.
    """
    if any(item.get_closest_marker(name) for item in session.items for name in ("chaos", "soak")):
        os.environ.update(process_forks.WITHOUT)
    elif any(_find_place(item.path, _ON_RAY) < len(_ON_RAY) for item in session.items):
        process_forks.wake_server()
    memory.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freezes what the tests of a file leave behind, at the end of the file."""
    if nextitem is not None and nextitem.path != item.path:
        memory.freeze()


def _find_place(path: Path, folders: tuple[str, ...]) -> int:
    """Returns the index of the first of some folders that a file is in, or how many there are."""
    places = (index for index, folder in enumerate(folders) if path.is_relative_to(_TESTS / folder))
    return next(places, len(folders))


class RunFresh(Protocol):
    """Runs a program in a process in which JAX has not started; returns what it printed."""

    def __call__(self, program: str, **environment: str) -> str: ...


@pytest.fixture
def run_fresh() -> RunFresh:
    """Gives a function that runs a program in a fresh Python, for what happens at imports."""

    def start(source: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    return functools.partial(_run, start)


@pytest.fixture
def run_forked() -> RunFresh:
    """Gives a function that runs a program in a process that has imported JAX; this is cheap."""
    return functools.partial(_run, forked.start_forked)


def _run(
    start: Callable[..., subprocess.Popen[str] | forked.ForkedProcess],
    program: str,
    **environment: str,
) -> str:
    process = start(textwrap.dedent(program), environment_of_tests.inherited() | environment)
    try:
        out, err = process.communicate()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        pytest.fail(f"the process ended with {process.returncode}:\n{out}{err}")
    return out.strip()


def _threads() -> set[threading.Thread]:
    """Returns the threads that somebody must end: ours, and whatever keeps a process alive."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.is_alive() and (not thread.daemon or thread.name.lower().startswith("distribax"))
    }


def _children() -> dict[int, str]:
    """Returns the command lines of this process' children by process id, zombies included."""
    commands = dict.fromkeys(forked.list_running(), "a program of the test")
    for pid in _list_children():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # The process has ended meanwhile.
        if not any(helper in command for helper in _HELPERS):
            commands[pid] = command or "a zombie: it has ended and nobody has waited for it"
    return commands


def _list_children() -> list[int]:
    """Returns the process ids of this process' children, as quickly as Python can.

    It is asked before and after each test, and a test process has a hundred threads to look at.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []  # There are none; to look at the list of every thread would take milliseconds.
    pids: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # The thread has ended meanwhile.
            descriptor = os.open(f"/proc/self/task/{thread}/children", os.O_RDONLY)
            try:
                pids += map(int, os.read(descriptor, _LONGEST_LIST).split())
            finally:
                os.close(descriptor)
    return pids


def _environment() -> dict[str, str]:
    hidden = _TEST_RUNNER_VARIABLES | _LIBRARY_VARIABLES
    return {k: v for k, v in os.environ.items() if k not in hidden}


def _wait_until_none(leaks: Callable[[], list[str]]) -> list[str]:
    """Returns what is still left after the grace period; at once when nothing is."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while left := leaks():
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves threads, processes, environment variables or a scope behind."""
    threads, children, environment = _threads(), _children(), _environment()
    yield
    left = _wait_until_none(lambda: [f"thread {t.name!r}" for t in _threads() - threads])
    left += _wait_until_none(
        lambda: [f"process {pid}: {cmd}" for pid, cmd in _children().items() if pid not in children]
    )
    after = _environment()
    left += [
        f"environment variable {name}: {environment.get(name)!r} became {after.get(name)!r}"
        for name in sorted(environment.keys() | after.keys())
        if environment.get(name) != after.get(name)
    ]
    if after != environment:
        # The next test starts from what this one found, whatever happened.
        for name in after.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    left += _scopes_left_open()
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _scopes_left_open() -> list[str]:
    """Returns the strategy that is still in scope, if any, and leaves its scope."""
    if not context.has_strategy():
        return []
    left = f"the scope of {context.get_strategy()}"
    with contextlib.suppress(RuntimeError):  # A `with` block that was entered by hand stays.
        context.experimental_set_strategy(None)
    return [left]

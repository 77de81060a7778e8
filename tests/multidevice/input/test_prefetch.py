"""The thread that makes batches ahead of use steps back, and is relieved where that is too much."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.data.distributed import prefetch
from distribax.data.distributed.priority import Background

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")


def _input_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distribax-input"]


def _priority(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class _Reader:
    """Reads batches slowly, so that the thread is ahead, and checks that none is missing."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._number = 0

    def read(self) -> None:
        numbers = [int(piece[0]) for piece in next(self._iterator).values]
        assert numbers == [self._number, self._number + 1]
        self._number += 2
        time.sleep(0.002)

    def read_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.read()


@pytest.fixture
def iterator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts from 0, two numbers a batch; nothing is known of the machine yet."""
    monkeypatch.setattr(prefetch, "_background", Background())
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.experimental_distribute_dataset(dx.data.Dataset.range(8000).batch(2))
    iterator = iter(dataset)
    yield iterator
    iterator.close()
    assert not _input_threads()


def test_a_thread_that_is_ahead_steps_back(iterator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_STARVED_SECONDS", float("inf"))
    reader = _Reader(iterator)
    reader.read()
    (thread,) = _input_threads()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert _priority(thread) == usual
    reader.read_until(lambda: _priority(thread) == 19)
    assert _priority(threading.main_thread()) == usual
    for _ in range(5):
        reader.read()
    assert _input_threads() == [thread]


def test_a_thread_that_comes_too_late_is_relieved(
    iterator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_STARVED_SECONDS", -1.0)
    reader = _Reader(iterator)
    reader.read()
    (first,) = _input_threads()
    reader.read_until(lambda: not first.is_alive())
    (second,) = _input_threads()
    for _ in range(30):
        reader.read()
    # The machine is busy: this one does not step back.
    assert _input_threads() == [second]
    assert _priority(second) == os.getpriority(os.PRIO_PROCESS, 0)


def test_relief_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_background", Background())
    monkeypatch.setattr(prefetch, "_STARVED_SECONDS", -1.0)
    monkeypatch.setattr(prefetch, "_AHEAD", 1)
    dataset = dx.data.Dataset.range(401).batch(4)
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    seen: list[int] = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        time.sleep(0.001)
        seen += [int(x) for piece in batch.values for x in np.asarray(piece)]
    assert seen == list(range(401))
    _until(lambda: not _input_threads())


def test_a_busy_machine_is_left_alone_for_a_while() -> None:
    background = Background()
    entered: list[bool] = []

    def enter() -> None:
        entered.append(background.enter())

    for _ in range(2):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        background.note_starvation()
    assert entered == [True, False]


def test_where_priorities_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert not Background().enter()

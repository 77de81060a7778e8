"""The thread that makes batches ahead of use: how far ahead, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from distribax.data.distributed import prefetch
from distribax.data.distributed.prefetch import Prefetcher

_NAME = "test-prefetch"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == _NAME]


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class _Numbers:
    """Counts, and remembers how far it came and whether it was released."""

    def __init__(self, stop: int) -> None:
        self._numbers: Iterator[int] = iter(range(stop))
        self.made = 0
        self.released = threading.Event()

    def make(self) -> int:
        number = next(self._numbers)
        self.made += 1
        return number


def _prefetch(numbers: _Numbers, size: int) -> Prefetcher[int]:
    return Prefetcher(numbers.make, size, numbers.released.set, _NAME)


@pytest.mark.parametrize("size", [1, 3])
def test_items_come_in_order_until_the_end_which_is_final(size: int) -> None:
    numbers = _Numbers(20)
    prefetcher = _prefetch(numbers, size)
    assert [prefetcher.next() for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetcher.next()
    assert numbers.released.wait(300)
    _wait_until(lambda: not _threads())


def test_the_thread_is_ahead_by_its_buffer_and_the_item_in_its_hand() -> None:
    numbers = _Numbers(100)
    prefetcher = _prefetch(numbers, 3)
    _wait_until(lambda: numbers.made == 4)
    time.sleep(0.05)
    assert numbers.made == 4
    prefetcher.next()
    _wait_until(lambda: numbers.made == 5)
    prefetcher.close()
    assert not _threads()


def test_a_consumer_with_a_full_buffer_has_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_HEAD_START_SECONDS", 300.0)
    numbers = _Numbers(100)
    prefetcher = _prefetch(numbers, 2)
    _wait_until(lambda: numbers.made == 2)
    assert prefetcher.next() == 0
    time.sleep(0.05)
    assert numbers.made == 2  # It waits, as one item is still there.
    # An empty buffer ends the head start, and so does the end.
    assert [prefetcher.next() for _ in range(3)] == [1, 2, 3]
    prefetcher.close()
    assert not _threads()


def test_close_ends_the_thread() -> None:
    numbers = _Numbers(100)
    prefetcher = _prefetch(numbers, 1)
    prefetcher.next()
    prefetcher.close()
    assert numbers.released.is_set()
    assert not _threads()
    with pytest.raises(ValueError, match="closed"):
        prefetcher.next()


def test_a_prefetcher_that_nobody_uses_ends_its_thread() -> None:
    numbers = _Numbers(100)
    prefetcher = _prefetch(numbers, 1)
    prefetcher.next()
    del prefetcher
    gc.collect()
    assert numbers.released.wait(300)
    _wait_until(lambda: not _threads())

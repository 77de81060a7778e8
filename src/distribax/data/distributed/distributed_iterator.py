"""`DistributedIterator`: batches on the devices, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distribax.data.distributed.feed import Feeder
from distribax.data.distributed.prefetch import Prefetcher
from distribax.data.distributed.steps import Steps
from distribax.errors import OutOfRangeError
from distribax.execution import LiftedIterator
from distribax.topology import InputTarget
from distribax.types import Nest

_VERSION = 1
# Asking a pipeline for its position costs time; between two answers, steps are counted.
_STEPS_PER_SNAPSHOT = 32


class _Source:
    """The pipeline's side: makes fed steps, each with the position after it."""

    def __init__(self, steps: Steps, feeder: Feeder) -> None:
        self.steps = steps
        self.feeder = feeder
        self.count = 0
        self.base: tuple[int, Any] = (0, _position(steps))

    def __call__(self) -> tuple[Nest, int, tuple[int, Any]]:
        try:
            step = self.steps.pull()
        except StopIteration:
            raise
        except Exception:
            # What failed was passed over; counting on from before it would come to it again.
            self.base = (self.count, _position(self.steps))
            raise
        element = self.feeder(step)
        self.count += 1
        if self.count - self.base[0] >= _STEPS_PER_SNAPSHOT:
            self.base = (self.count, _position(self.steps))
        return element, self.count, self.base


def _position(steps: Steps) -> Any:
    """Returns the pipeline's position, or the reason why it has none."""
    try:
        return steps.get_state()
    except ValueError as error:
        return error


class DistributedIterator(LiftedIterator):
    """Iterates over a distributed data set.

    `next` works inside `dx.function`: the element is fetched at each call and fed to the step.
    Batches are made and put on the devices ahead of use by a thread that ends with the iterator.
    """

    def __init__(
        self,
        start: Callable[[], Steps],
        feeder: Feeder,
        buffer_size: int,
        element_spec: Callable[[], Any],
        shard: dict[str, Any],
    ) -> None:
        self._start = start
        self._feeder = feeder
        self._buffer_size = buffer_size
        self._spec = element_spec
        self._shard = shard
        self._prefetcher: Prefetcher | None = None
        self._source: _Source | None = None
        self._open(start())

    def _open(self, steps: Steps) -> None:
        self._source = source = _Source(steps, self._feeder)
        self._at: tuple[int, tuple[int, Any]] = (0, source.base)
        self._prefetcher = None
        self._closed = False

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements."""
        return self._spec()

    @property
    def input_target(self) -> InputTarget:
        """Who is fed, and which of the workers this is."""
        return self._feeder.target

    def fetch(self) -> Nest:
        """Returns the next element, outside of any trace."""
        source = self._source
        if source is None or self._closed:
            raise ValueError("this iterator was closed; make a new one with iter(dist_dataset).")
        try:
            if self._buffer_size == 0:
                element, count, base = source()
            else:
                if self._prefetcher is None:
                    # Started on the first use, so that a position can be restored before.
                    self._prefetcher = Prefetcher(
                        source, self._buffer_size, source.steps.close, "distribax-input"
                    )
                element, count, base = self._prefetcher.next()
        except StopIteration:
            raise OutOfRangeError("the distributed data set is at its end") from None
        self._at = (count, base)
        return element

    def initialize(self) -> None:
        """Does nothing: the iterator is ready. It stands for TensorFlow 1's initializers."""

    @property
    def initializer(self) -> None:
        """None; stands for TensorFlow 1's initializers."""
        return None

    # Saving and restoring.

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last element that was given out, as JSON-able data."""
        count, (base_count, base) = self._at
        if isinstance(base, ValueError):
            raise base
        return {
            "version": _VERSION,
            "shard": self._shard,
            "base": base,
            "skip": count - base_count,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned; the next element is the one after it."""
        if not isinstance(state, dict) or state.get("version") != _VERSION or "shard" not in state:
            raise ValueError(
                f"set_state: state={str(state)[:80]!r} is not a position of a distributed "
                "iterator. Expected what get_state() returned."
            )
        saved = state["shard"]
        if saved != self._shard and "per_worker" in (saved["kind"], self._shard["kind"]):
            raise ValueError(
                f"set_state: the position was saved by {_described(saved)}, but this iterator is "
                f"{_described(self._shard)}. Where each worker reads its own files or its own "
                "data set, a position fits only the same worker of the same number of workers. "
                "AutoShardPolicy.DATA has positions that fit any number."
            )
        steps = self._start()
        try:
            steps.set_state(state["base"])
            steps.skip(state["skip"])
        except BaseException:
            # A position that does not fit leaves this iterator where it is.
            steps.close()
            raise
        self.close()
        self._open(steps)

    def close(self) -> None:
        """Ends the iterator and its threads; further calls do nothing."""
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
        elif self._source is not None:
            self._source.steps.close()


def _described(shard: dict[str, Any]) -> str:
    if shard["kind"] == "global":
        return "all workers together"
    return f"worker {shard['worker_id']} of {shard['num_workers']}, which has its own data"

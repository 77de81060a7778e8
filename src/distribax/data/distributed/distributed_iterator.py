"""`DistributedIterator`: batches on the devices, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from typing_extensions import override

from distribax import context, contracts
from distribax.data.distributed.feed import Feeder
from distribax.data.distributed.position_owner import PositionOwner
from distribax.data.distributed.prefetch import Prefetcher
from distribax.data.distributed.step_batches import Steps
from distribax.data.element_spec import Spec
from distribax.data.elements import Element
from distribax.errors import OutOfRangeError, ReplicaInputError
from distribax.execution import LiftedIterator, Optional

_VERSION: Final = 1
# Asking a pipeline for its position costs time; between two answers, steps are counted.
_STEPS_PER_SNAPSHOT: Final = 32


def require_outside_replica(what: str) -> None:
    """Refuses `what` inside a replica, where each one would take a batch meant for all of them."""
    if context.get_replica_context() is not None and context.has_strategy():
        raise ReplicaInputError(
            f"{what}: called inside strategy.run(), where each replica would take a batch that is "
            "meant for all of them. Call it outside and pass each replica its part: "
            "strategy.run(fn, args=(next(iterator),))."
        )


@dataclass(frozen=True)
class _PipelinePosition:
    """A position of the pipeline, and how many steps were taken since.

    `base` is an error if the pipeline has no position: the reason why.
    """

    base: dict[str, Any] | ValueError
    num_steps: int = 0


class _ElementProducer:
    """The pipeline's side: makes elements, each with the position after it."""

    def __init__(self, steps: Steps, feeder: Feeder) -> None:
        self._steps = steps
        self._feeder = feeder
        self.position = self._ask_position()
        self.close = steps.close

    def _ask_position(self) -> _PipelinePosition:
        try:
            return _PipelinePosition(self._steps.get_state())
        except ValueError as error:
            return _PipelinePosition(error)

    def pull(self) -> tuple[Element, _PipelinePosition]:
        try:
            step = self._steps.pull()
        except StopIteration:
            raise
        except Exception:
            # The pipeline has passed the element that failed; counting steps from a position
            # before it would come to it again.
            self.position = self._ask_position()
            raise
        element = self._feeder(step)
        position = replace(self.position, num_steps=self.position.num_steps + 1)
        if position.num_steps >= _STEPS_PER_SNAPSHOT:
            position = self._ask_position()
        self.position = position
        return element, position


class DistributedIterator(LiftedIterator):
    """Iterates over a distributed data set.

    `next` works inside `dx.function`: the element is fetched at each call and fed to the step.
    A thread makes batches and puts them on the devices ahead of use; it ends with the iterator.

    Args:
        start: Starts the pipeline that feeds this worker.
        feeder: Puts its batches on the devices.
        buffer_size: How many elements are made ahead of use; 0 makes each when it is asked for.
        element_spec: Returns the shapes and data types of the elements.
        owner: Whose positions the iterator saves.
    """

    def __init__(
        self,
        start: Callable[[], Steps],
        feeder: Feeder,
        buffer_size: int,
        element_spec: Callable[[], Spec],
        owner: PositionOwner,
    ) -> None:
        self._start = start
        self._feeder = feeder
        self._buffer_size = buffer_size
        self._spec = element_spec
        self._owner = owner
        self._open(start())

    def _open(self, steps: Steps) -> None:
        self._producer = _ElementProducer(steps, self._feeder)
        self._position = self._producer.position
        self._prefetcher: Prefetcher[tuple[Element, _PipelinePosition]] | None = None
        self._is_closed = False

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements."""
        return self._spec()

    @property
    def input_target(self) -> contracts.InputTarget:
        """The replicas that are fed, and which of the workers this is."""
        return self._feeder.target

    @override
    def __next__(self) -> Any:
        require_outside_replica("next(iterator)")
        return super().__next__()

    @override
    def __iter__(self) -> Self:
        require_outside_replica("a loop over a distributed iterator")
        return super().__iter__()

    @override
    def get_next_as_optional(self) -> Optional:
        """Returns the next element if there is one, and says so.

        Returns:
            An object with `has_value()` and `get_value()`.

        Raises:
            ReplicaInputError: It is called in a replica.
        """
        require_outside_replica("get_next_as_optional()")
        return super().get_next_as_optional()

    @override
    def fetch(self) -> Any:
        """Returns the next element, outside of any trace.

        Raises:
            OutOfRangeError: The data set is at its end. It is a StopIteration too.
            ValueError: The iterator was closed.
        """
        if self._is_closed:
            raise ValueError("this iterator was closed; make a new one with iter(dist_dataset).")
        try:
            if self._buffer_size == 0:
                element, self._position = self._producer.pull()
                return element
            if self._prefetcher is None:
                # Started on the first use, so that a position can be restored before.
                self._prefetcher = Prefetcher(
                    self._producer.pull, self._buffer_size, self._producer.close, "distribax-input"
                )
            element, self._position = self._prefetcher.next()
            return element
        except StopIteration:
            raise OutOfRangeError("the distributed data set is at its end") from None

    def initialize(self) -> None:
        """Does nothing, as the iterator is ready. Exists for TensorFlow 1's initializers."""

    @property
    def initializer(self) -> None:
        """None. Exists for TensorFlow 1's initializers."""
        return None

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last element that was given out, as JSON-able data.

        Raises:
            ValueError: The data set cannot be resumed, for example a generator object.
        """
        base = self._position.base
        if isinstance(base, ValueError):
            raise base
        return {
            "version": _VERSION,
            "shard": self._owner.save(),
            "base": base,
            "skip": self._position.num_steps,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; the next element is the one after it.

        Args:
            state: What `get_state` returned, of an iterator of an equal data set.

        Raises:
            ValueError: `state` is not a position, or that of another pipeline or worker. The
                iterator stays where it is.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION or "shard" not in state:
            raise ValueError(
                f"set_state: state={str(state)[:80]!r} is not a position of a distributed "
                "iterator. Expected what get_state() returned."
            )
        saved = PositionOwner.load(state["shard"])
        if saved != self._owner:
            raise ValueError(
                f"set_state: the position was saved by {saved}, but this iterator is {self._owner}."
                " Where each worker reads its own files or its own data set, a position fits only "
                "the same worker of the same number of workers. AutoShardPolicy.DATA has positions "
                "that fit any number."
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
        self._is_closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
        else:
            self._producer.close()

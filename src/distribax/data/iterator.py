"""The iterator of a data set: elements on the host, with a position that can be saved."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.plan.passes import ALONE, continue_after, start_pass
from distribax.data.plan.pieces import WorkerPart
from distribax.data.plan.plan_node import Node, fingerprint, walk
from distribax.data.plan.sources import Foreign
from distribax.data.runtime import runner
from distribax.data.runtime.pass_context import Seeds
from distribax.errors import OutOfRangeError
from distribax.execution import LiftedIterator

if TYPE_CHECKING:
    from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator

_VERSION = 1


class _Running:
    """Holds the running pipeline apart from the iterator, to end it when that is gone."""

    def __init__(self) -> None:
        self.iterator: PipelineIterator | None = None

    def close(self) -> None:
        iterator, self.iterator = self.iterator, None
        if iterator is not None:
            iterator.close()


class DatasetIterator(LiftedIterator):
    """Iterates over a data set; can be saved and restored in the middle.

    `next` works inside `dx.function`: the element is fetched at each call and fed to the step.
    `get_state` returns a small dict that JSON can hold. It stores positions, never elements:
    `set_state` reads again what a shuffle buffer or a half used batch held. Generators are resumed
    by starting them again and reading up to the place, so they must yield the same values again.
    Threads of the pipeline end when the iterator is exhausted, closed or no longer used.

    Args:
        plan: The data set's plan.
    """

    def __init__(self, plan: Node) -> None:
        self._plan = plan
        parts = (node for node in walk(plan) if isinstance(node, WorkerPart))
        self._worker = next((part.worker for part in parts), ALONE)
        self._run = start_pass(plan, self._worker)
        self._seeds = Seeds.of(plan)
        self._running = _Running()
        # Also runs before the interpreter shuts down, when threads could no longer be joined.
        weakref.finalize(self, self._running.close)
        self._running.iterator = runner.start(plan, self._run, self._seeds)

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements."""
        return self._plan.spec(runner.read_first_element)

    @override
    def fetch(self) -> Element:
        """Returns the next element, outside of any trace.

        Raises:
            OutOfRangeError: The data set is at its end. It is a StopIteration too.
            ValueError: The iterator was closed.
        """
        iterator = self._running.iterator
        if iterator is None:
            raise ValueError("this iterator was closed; make a new one with iter(dataset).")
        try:
            return next(iterator)
        except StopIteration:
            raise OutOfRangeError("the data set is at its end") from None

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last element that was given out, as JSON-able data.

        Raises:
            ValueError: The data set cannot be resumed, or the iterator was closed.
        """
        iterator = self._running.iterator
        if iterator is None:
            raise ValueError("this iterator was closed, its position is lost.")
        for node in walk(self._plan):
            if isinstance(node, Foreign) and node.save is None:
                raise ValueError(
                    f"the position in {node.kind} cannot be saved: it cannot be resumed. Use a "
                    "dx.data.Dataset, a function that makes a generator, or a Grain data set."
                )
        return {
            "version": _VERSION,
            "pipeline": fingerprint(self._plan),
            "run": self._run,
            "seeds": self._seeds.save(self._plan),
            "position": iterator.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; the next element is the one after it.

        Later iterations of the same data set are numbered from the restored one, so that training
        shuffles after a restart as it would have without one.

        Args:
            state: What `get_state` returned, of this or an equal pipeline.

        Raises:
            ValueError: `state` is not a position, or that of another pipeline.
        """
        own = fingerprint(self._plan)
        if not isinstance(state, dict) or state.get("version") != _VERSION or "run" not in state:
            raise ValueError(
                f"state={str(state)[:80]!r} is not a position of a data set iterator. Expected "
                "what get_state() returned."
            )
        if state["pipeline"] != own:
            raise ValueError(
                "the state belongs to another pipeline.\n"
                f"  saved:   {state['pipeline']}\n  this one: {own}\n"
                "Restore it into a data set with the same steps and sizes."
            )
        self.close()
        self._run = state["run"]
        continue_after(self._plan, self._worker, self._run)
        self._seeds = Seeds.load(self._plan, state["seeds"])
        iterator = runner.start(self._plan, self._run, self._seeds)
        self._running.iterator = iterator
        iterator.set_state(state["position"])

    def close(self) -> None:
        """Ends the iterator and the threads of its pipeline; further calls do nothing."""
        self._running.close()

    def __enter__(self) -> DatasetIterator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

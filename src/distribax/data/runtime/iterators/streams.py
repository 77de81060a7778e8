"""Steps on a stream of elements, one element at a time.

They are Grain iterators. Grain's own map and filter would do, but they keep statistics that cost
about five microseconds an element, several times the work of a small NumPy function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from distribax import jax_private
from distribax.data import elements
from distribax.data.elements import Element
from distribax.data.plan.order import Take
from distribax.data.plan.transforms import Enumerate, Filter
from distribax.data.runtime.iterators.pipeline_iterator import (
    PipelineIterator,
    Stage,
    StatefulStage,
)
from distribax.data.runtime.pass_context import IteratorState


class UserCall:
    """A user's function with tf.data's calling convention and errors that name it."""

    def __init__(self, fn: Callable[..., Any], step: str) -> None:
        self._fn = fn
        self._step = step

    def __call__(self, element: Element) -> Any:
        try:
            return elements.call_with_element(self._fn, element)
        except StopIteration as error:
            # Let through, it would end the data set early and silently.
            raise RuntimeError(f"{self._name()} raised StopIteration") from error
        except Exception as error:
            error.add_note(f"in {self._name()}, given an element {elements.describe(element)}")
            raise

    def _name(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        code = getattr(self._fn, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"the function {name}{place} given to Dataset.{self._step}"


class MappedCall(UserCall):
    """A user's function whose result becomes an element."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn, "map")

    @override
    def __call__(self, element: Element) -> Element:
        result = super().__call__(element)
        # Most results are arrays of numbers, which are elements as they are.
        if type(result) is np.ndarray and result.dtype.kind in "biufc":
            return result
        try:
            return elements.from_return(result)
        except Exception as error:
            error.add_note(f"in what {self._name()} returned")
            raise


class MapIterator(Stage):
    """Every element through a function."""

    def __init__(self, parent: PipelineIterator, call: Callable[[Any], Any]) -> None:
        super().__init__(parent)
        self._call = call

    @override
    def __next__(self) -> Element:
        return self._call(self._next())


class SettingsIterator(Stage):
    """Gives the thread that reads ahead the settings of JAX that hold where the pipeline starts."""

    def __init__(self, parent: PipelineIterator) -> None:
        super().__init__(parent)
        self._apply = jax_private.copy_thread_settings()
        self._thread = threading.get_ident()

    @override
    def __next__(self) -> Element:
        if self._thread != threading.get_ident():
            self._apply()
            self._thread = threading.get_ident()
        return self._next()


class FilterIterator(Stage):
    """The elements that a predicate lets through."""

    def __init__(self, parent: PipelineIterator, node: Filter) -> None:
        super().__init__(parent)
        self._call = UserCall(node.predicate, "filter")

    @override
    def __next__(self) -> Element:
        while True:
            element = self._next()
            if as_bool(self._call(element), "filter"):
                return element


def as_bool(answer: object, step: str) -> bool:
    """Returns what a user's predicate has answered."""
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    array = np.asarray(answer)
    if array.dtype != np.bool_ or array.ndim:
        raise ValueError(
            f"the predicate given to Dataset.{step} returned {answer!r}. Expected one bool, for "
            "example x > 0, or np.all(x > 0) for an array."
        )
    return bool(array)


class TakeIterator(StatefulStage):
    """The first elements."""

    saved = "taken"

    def __init__(self, parent: PipelineIterator, node: Take) -> None:
        super().__init__(parent)
        self._count = node.count
        self.taken = 0

    @override
    def __next__(self) -> Element:
        if self.taken >= self._count:
            raise StopIteration
        element = self._next()
        self.taken += 1
        return element


class StrideIterator(StatefulStage):
    """Leaves out `skip` elements, then gives every `step`-th: both skip and shard."""

    saved = "left"

    def __init__(self, parent: PipelineIterator, skip: int, step: int = 1) -> None:
        super().__init__(parent)
        self._between = step - 1
        # How many to leave out before the next one. Those that could not be made do not count.
        self.left = skip

    @override
    def __next__(self) -> Element:
        while self.left:
            self._next()
            self.left -= 1
        element = self._next()
        self.left = self._between
        return element


class EnumerateIterator(StatefulStage):
    """Every element with its number."""

    saved = "number"

    def __init__(self, parent: PipelineIterator, node: Enumerate) -> None:
        super().__init__(parent)
        self.number = node.start

    @override
    def __next__(self) -> Element:
        element = self._next()
        number = np.int64(self.number)
        self.number += 1
        return (number, element)


class ManyIterator(Stage):
    """Several elements from each of the parent's: the rows of a batch, the parts of a batch.

    The position is the parent's before its current element, and how many came of that one.
    """

    def __init__(self, parent: PipelineIterator, divide: Callable[[Element], Any]) -> None:
        super().__init__(parent)
        self._divide = divide
        self._before: Any = None
        self._parts: Any = ()
        self._given = 0

    @override
    def __next__(self) -> Element:
        while self._given >= len(self._parts):
            self._advance()
        self._given += 1
        return self._parts[self._given - 1]

    def _advance(self) -> None:
        before = self._input.get_state()
        self._parts = self._divide(self._next())
        self._before, self._given = before, 0

    @override
    def get_state(self) -> IteratorState:
        if self._given >= len(self._parts):
            return IteratorState(parent=self._input.get_state(), given=0)
        return IteratorState(parent=self._before, given=self._given)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._input.set_state(state["parent"])
        self._parts, self._given = (), 0
        if state["given"]:
            self._advance()
            self._given = state["given"]


class BatchRows:
    """The rows of a batch, as a sequence of elements."""

    def __init__(self, batch: Element) -> None:
        self._batch = batch
        self._size = elements.count_rows(batch)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Element:
        return elements.map_leaves(lambda leaf: leaf[row], self._batch)

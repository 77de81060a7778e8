"""Elements that are kept, changed or counted one by one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.elements import Element
from distribax.data.plan.plan_node import INFINITE_CARDINALITY
from distribax.data.plan.selection import (
    AssertCardinality,
    IgnoreErrors,
    Resample,
    Scan,
    TakeWhile,
)
from distribax.data.runtime import permutation
from distribax.data.runtime.iterators.pipeline_iterator import (
    PipelineIterator,
    ReplayStage,
    Stage,
    StatefulStage,
)
from distribax.data.runtime.iterators.streams import UserCall, as_bool
from distribax.data.runtime.pass_context import Progress
from distribax.data.runtime.permutation import Key

_logger = logging.getLogger(__name__)


class TakeWhileIterator(StatefulStage):
    """The elements up to the first that a predicate refuses."""

    saved = "ended"

    def __init__(self, parent: PipelineIterator, node: TakeWhile) -> None:
        super().__init__(parent)
        self._call = UserCall(node.predicate, "take_while")
        self.ended = False

    @override
    def __next__(self) -> Element:
        if self.ended:
            raise StopIteration
        element = self._next()
        if not as_bool(self._call(element), "take_while"):
            self.ended = True
            raise StopIteration
        return element


class ScanIterator(ReplayStage):
    """Every element through a function that passes a state on."""

    def __init__(self, parent: PipelineIterator, node: Scan) -> None:
        self._node = node
        self._call = UserCall(node.call, "scan")
        super().__init__(parent)

    @override
    def _restart(self) -> None:
        self._state = self._node.initial_state

    @override
    def _make(self) -> Element:
        self._state, element = self._call((self._state, self._next()))
        return element


class UniqueIterator(ReplayStage):
    """The elements that did not come before."""

    @override
    def _restart(self) -> None:
        self._seen: set[Any] = set()

    @override
    def _make(self) -> Element:
        while True:
            element = self._next()
            if isinstance(element, (tuple, dict)) or np.ndim(element):  # type: ignore[arg-type]
                raise ValueError(
                    f"unique takes single numbers or texts; an element is "
                    f"{elements.describe(element)}. Choose one component with map."
                )
            value = element if isinstance(element, bytes) else np.asarray(element).item()
            if value not in self._seen:
                self._seen.add(value)
                return element


class IgnoreErrorsIterator(Stage):
    """The elements that could be made."""

    def __init__(self, parent: PipelineIterator, node: IgnoreErrors, progress: Progress) -> None:
        super().__init__(parent)
        self._log_warning = node.log_warning
        self._progress = progress

    @override
    def __next__(self) -> Element:
        failed_at = None
        while True:
            try:
                return self._next()
            except StopIteration:
                raise
            except Exception as error:
                # An input that fails twice without moving would do so without end. Steps that
                # hold elements move before their position does.
                position = (self._progress.num_given, self._input.get_state())
                if position == failed_at:
                    raise
                failed_at = position
                if self._log_warning:
                    _logger.warning("ignore_errors left out an element: %r", error)


class AssertCardinalityIterator(StatefulStage):
    """The elements, which are counted."""

    saved = "given"

    def __init__(self, parent: PipelineIterator, node: AssertCardinality) -> None:
        super().__init__(parent)
        self._expected = node.count
        self.given = 0

    @override
    def __next__(self) -> Element:
        expected = "infinitely many" if self._expected == INFINITE_CARDINALITY else self._expected
        try:
            element = self._next()
        except StopIteration:
            if self.given == self._expected:
                raise
            raise ValueError(
                f"assert_cardinality: the data set was expected to have {expected} elements, but "
                f"has only {self.given}."
            ) from None
        if self.given == self._expected:
            raise ValueError(
                f"assert_cardinality: the data set was expected to have {expected} elements, but "
                "has more."
            )
        self.given += 1
        return element


class ResampleIterator(ReplayStage):
    """Elements with their class; the classes that are too frequent lose some."""

    def __init__(self, parent: PipelineIterator, node: Resample, key: Key) -> None:
        self._call = UserCall(node.class_func, "rejection_resample")
        self._target = np.array(node.target)
        self._initial = None if node.initial is None else np.array(node.initial)
        self._key = key
        super().__init__(parent)

    @override
    def _restart(self) -> None:
        self._draws = permutation.draw_uniforms(self._key)
        # As if each class had been seen once.
        self._counts = np.ones(len(self._target))

    @override
    def _make(self) -> Element:
        while True:
            element = self._next()
            label = elements.to_element(self._call(element))
            number = int(np.asarray(label))
            if not 0 <= number < len(self._target):
                raise ValueError(
                    f"class_func returned {number}, but target_dist has the classes 0 to "
                    f"{len(self._target) - 1}."
                )
            self._counts[number] += 1
            initial = self._counts / self._counts.sum() if self._initial is None else self._initial
            ratios = self._target / np.maximum(initial, np.finfo(np.float64).tiny)
            if next(self._draws) * ratios.max() < ratios[number]:
                return (label, element)

"""Steps with several inputs: repeat, concatenate, zip, choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.pass_context import IteratorState


class Opener(PipelineIterator):
    """An iterator that opens one input after the other, by number."""

    _current: PipelineIterator | None = None

    def __init__(self, open_input: Callable[[int], PipelineIterator]) -> None:
        super().__init__()
        self._open = open_input
        self._number = -1
        self._switch(0)

    def _switch(self, number: int) -> None:
        if self._current is not None:
            self._current.close()
        self._number = number
        self._current = self._open(number)

    @override
    def _stop(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()

    @override
    def get_state(self) -> IteratorState:
        assert self._current is not None
        return IteratorState(number=self._number, input=self._current.get_state())

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._switch(state["number"])
        assert self._current is not None
        self._current.set_state(state["input"])


class RepeatIterator(Opener):
    """The input again and again; every pass opens it again, so that shuffles differ."""

    def __init__(self, open_input: Callable[[int], PipelineIterator], count: int | None) -> None:
        super().__init__(open_input)
        self._count = count
        self._gave = False

    @override
    def __next__(self) -> Element:
        while True:
            assert self._current is not None
            try:
                element = next(self._current)
            except StopIteration:
                last = self._count is not None and self._number + 1 >= self._count
                # An empty input that is repeated endlessly ends, as in tf.data.
                if last or (self._count is None and not self._gave):
                    raise
                self._gave = False
                self._switch(self._number + 1)
            else:
                self._gave = True
                return element

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(super().get_state(), gave=self._gave)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._gave = state["gave"]


class ConcatenateIterator(Opener):
    """One input after the other."""

    def __init__(self, open_input: Callable[[int], PipelineIterator], num_inputs: int) -> None:
        super().__init__(open_input)
        self._num_inputs = num_inputs

    @override
    def __next__(self) -> Element:
        while True:
            assert self._current is not None
            try:
                return next(self._current)
            except StopIteration:
                if self._number + 1 >= self._num_inputs:
                    raise
                self._switch(self._number + 1)


class ZipIterator(PipelineIterator):
    """Elements side by side, until the first input ends."""

    def __init__(
        self,
        parents: Sequence[PipelineIterator],
        build: Callable[[list[Any]], Element],
    ) -> None:
        super().__init__(parents)
        self._inputs = list(parents)
        self._build = build

    @override
    def __next__(self) -> Element:
        return self._build([next(parent) for parent in self._inputs])

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(inputs=[parent.get_state() for parent in self._inputs])

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        for parent, saved in zip(self._inputs, state["inputs"], strict=True):
            parent.set_state(saved)


class ChooseIterator(PipelineIterator):
    """Each element from the input whose number comes next."""

    def __init__(
        self, choice: PipelineIterator, parts: Sequence[PipelineIterator], stop_on_empty: bool
    ) -> None:
        super().__init__([choice, *parts])
        self._choice = choice
        self._parts = list(parts)
        self._stop_on_empty = stop_on_empty
        self._ended = [False] * len(parts)

    @override
    def __next__(self) -> Element:
        while not all(self._ended):
            number = int(np.asarray(next(self._choice)))
            if not 0 <= number < len(self._parts):
                raise ValueError(
                    f"choice_dataset gave {number}, but there are the data sets 0 to "
                    f"{len(self._parts) - 1}."
                )
            if self._ended[number]:
                continue
            try:
                return next(self._parts[number])
            except StopIteration:
                self._ended = [self._stop_on_empty or ended for ended in self._ended]
                self._ended[number] = True
        raise StopIteration

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(
            choice=self._choice.get_state(),
            parts=[part.get_state() for part in self._parts],
            ended=list(self._ended),
        )

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._choice.set_state(state["choice"])
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.set_state(saved)
        self._ended = list(state["ended"])


class EmptyIterator(PipelineIterator):
    """No element at all."""

    @override
    def __next__(self) -> Element:
        raise StopIteration

    @override
    def get_state(self) -> IteratorState:
        return IteratorState()

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        pass

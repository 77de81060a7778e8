"""Data sets made of elements, read in turns: interleave and flat_map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator, Stage
from distribax.data.runtime.pass_context import IteratorState

OpenInner: TypeAlias = Callable[[Element, int, int], PipelineIterator]
"""Starts the data set made of an element, given the element, its number and its place."""


@dataclass
class _CyclePlace:
    """A place of the cycle: an open iterator, and how to find its element again."""

    number: int
    before: dict[str, Any]
    iterator: PipelineIterator


class InterleaveIterator(Stage):
    """`block_length` elements from each of `cycle_length` open iterators in turn.

    A place whose iterator has ended is given to the next element of the input when its turn comes
    again, as in tf.data.
    """

    _places: list[_CyclePlace | None] = []  # noqa: RUF012

    def __init__(
        self,
        parent: PipelineIterator,
        open_inner: OpenInner,
        cycle_length: int,
        block_length: int,
    ) -> None:
        super().__init__(parent)
        self._open_inner = open_inner
        self._block_length = block_length
        self._places = [None] * cycle_length
        self._index = 0
        self._block = 0
        self._opened = 0
        self._input_ended = False

    @override
    def __next__(self) -> Element:
        while True:
            place = self._places[self._index]
            if place is not None:
                try:
                    element = next(place.iterator)
                except StopIteration:
                    place.iterator.close()
                    self._places[self._index] = None
                    self._advance()
                    continue
                self._block += 1
                if self._block == self._block_length:
                    self._advance()
                return element
            if not self._input_ended:
                self._fill_place()
            elif any(self._places):
                self._advance()
            else:
                raise StopIteration

    def _advance(self) -> None:
        self._block = 0
        self._index = (self._index + 1) % len(self._places)

    def _fill_place(self) -> None:
        before = self._input.get_state()
        try:
            element = self._next()
        except StopIteration:
            self._input_ended = True
            return
        inner = self._open_inner(element, self._opened, self._index)
        self._places[self._index] = _CyclePlace(self._opened, before, inner)
        self._opened += 1

    @override
    def get_state(self) -> IteratorState:
        cycle = [
            None if place is None else [place.number, place.before, place.iterator.get_state()]
            for place in self._places
        ]
        return IteratorState(
            input=self._input.get_state(),
            cycle=cycle,
            index=self._index,
            block=self._block,
            opened=self._opened,
            ended=self._input_ended,
        )

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        for index, saved in enumerate(state["cycle"]):
            if saved is None:
                continue
            number, before, inner_state = saved
            self._input.set_state(before)
            inner = self._open_inner(self._next(), number, index)
            inner.set_state(inner_state)
            self._places[index] = _CyclePlace(number, before, inner)
        self._input.set_state(state["input"])
        self._index = state["index"]
        self._block = state["block"]
        self._opened = state["opened"]
        self._input_ended = state["ended"]

    @override
    def _stop(self) -> None:
        for place in self._places:
            if place is not None:
                place.iterator.close()
        self._places = [None] * len(self._places)

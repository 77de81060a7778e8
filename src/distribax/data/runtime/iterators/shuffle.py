"""A shuffle of a stream: a buffer of elements, resumed without storing them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.runtime import permutation
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator, Stage
from distribax.data.runtime.pass_context import IteratorState
from distribax.data.runtime.permutation import Key


class ShuffleIterator(Stage):
    """Gives out elements in the order that `permutation` describes.

    The state holds no elements. It says how many have been read and given out, from which the
    places' content follows, and a position of the parent at or before the oldest element still
    in the buffer; to resume, the parent is read again from there.
    """

    def __init__(self, parent: PipelineIterator, buffer_size: int | None, key: Key) -> None:
        super().__init__(parent)
        self._limit = buffer_size
        self._key = key
        self._restart()

    def _restart(self) -> None:
        self._places: list[Element] = []
        # For each place, which element of the input it holds.
        self._numbers: list[int] = []
        self._read = 0
        self._given = 0
        self._filled = False
        self._ended = False
        self._draws: Iterator[int] = iter(())
        self._last: list[int] = []
        self._origins: deque[tuple[int, Any]] = deque()

    @override
    def __next__(self) -> Element:
        if not self._filled:
            self._fill()
        if not self._ended:
            number = self._read
            try:
                element = self._pull()
            except StopIteration:
                self._end()
            else:
                place = next(self._draws)
                given = self._places[place]
                self._places[place] = element
                self._numbers[place] = number
                self._given += 1
                return given
        position = self._given - (self._read - len(self._places))
        if position >= len(self._places):
            raise StopIteration
        place = self._last[position]
        given = self._places[place]
        # The element is the consumer's alone from here on.
        self._places[place] = None
        self._given += 1
        return given

    def _pull(self) -> Element:
        size = self._limit or 4096
        if self._read % size == 0:
            self._remember_origin()
        element = self._next()
        self._read += 1
        return element

    def _remember_origin(self) -> None:
        oldest = min(self._numbers, default=0)
        while len(self._origins) > 1 and self._origins[1][0] <= oldest:
            self._origins.popleft()
        # Without a limit nothing is ever given out before the end, so only the start matters.
        if not self._origins or self._limit is not None:
            self._origins.append((self._read, self._input.get_state()))

    def _fill(self) -> None:
        # A user's error may interrupt this; the next call then goes on where it stopped.
        while not self._ended and len(self._places) != self._limit:
            try:
                element = self._pull()
            except StopIteration:
                self._end()
            else:
                self._places.append(element)
                self._numbers.append(self._read - 1)
        self._filled = True
        if not self._ended:
            self._draws = permutation.draw_places(self._key, len(self._places))

    def _end(self) -> None:
        self._ended = True
        self._last = permutation.draw_last_order(self._key, len(self._places)).tolist()

    @override
    def get_state(self) -> IteratorState:
        if not self._given:
            # Nothing was given out: what was read can be read again.
            origin = self._origins[0][1] if self._origins else self._input.get_state()
            return IteratorState(given=0, read=0, ended=False, origin=[0, origin])
        return IteratorState(
            given=self._given,
            read=self._read,
            ended=self._ended,
            origin=list(self._origins[0]),
        )

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._restart()
        start, origin = state["origin"]
        self._input.set_state(origin)
        if not state["given"]:
            return
        self._origins.append((start, origin))
        self._refill(start, state)

    def _refill(self, start: int, state: dict[str, Any]) -> None:
        read, given = state["read"], state["given"]
        size = read if self._limit is None else min(self._limit, read)
        # Until the input ends, each element given out was replaced by the next one read.
        self._numbers = permutation.fill_places(self._key, size, read - size).tolist()
        self._places = [None] * size
        where = {number: place for place, number in enumerate(self._numbers)}
        self._given, self._ended, self._filled = given, state["ended"], True
        if self._ended:
            self._end()
            for place in self._last[: given - (read - size)]:
                del where[self._numbers[place]]
        for number in range(start, read):
            element = self._next()
            if number in where:
                self._places[where[number]] = element
        self._read = read
        if not self._ended:
            self._draws = permutation.draw_places(self._key, size, skip=read - size)

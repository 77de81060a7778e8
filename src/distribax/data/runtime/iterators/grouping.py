"""Windows, groups by a key, and batches of another size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.elements import Element
from distribax.data.plan.grouping import GroupByWindow, Rebatch, Window
from distribax.data.runtime.iterators.pipeline_iterator import (
    PipelineIterator,
    ReplayStage,
    Stage,
)
from distribax.data.runtime.iterators.streams import UserCall
from distribax.data.runtime.pass_context import IteratorState


class WindowIterator(Stage):
    """Data sets of the elements in a buffer, which moves on by `shift` elements."""

    def __init__(self, parent: PipelineIterator, node: Window) -> None:
        super().__init__(parent)
        self._node = node
        # Each element with the input's position before it.
        self._held: deque[tuple[dict[str, Any], Element]] = deque()

    @override
    def __next__(self) -> Element:
        node = self._node
        self._fill(node.span)
        if not self._held or (node.drop_remainder and len(self._held) < node.span):
            raise StopIteration
        window = [element for _, element in self._held][:: node.stride]
        for _ in range(node.shift):
            if not self._held:
                self._fill(1)
            if not self._held:
                break
            self._held.popleft()
        return node.make(window)

    def _fill(self, count: int) -> None:
        while len(self._held) < count:
            before = self._input.get_state()
            try:
                self._held.append((before, self._next()))
            except StopIteration:
                return

    @override
    def get_state(self) -> IteratorState:
        origin = self._held[0][0] if self._held else self._input.get_state()
        return IteratorState(origin=origin, held=len(self._held))

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._held.clear()
        self._input.set_state(state["origin"])
        self._fill(state["held"])


class GroupByWindowIterator(ReplayStage):
    """The elements of the data sets that a user's function makes of full groups."""

    _inner: PipelineIterator | None = None

    def __init__(
        self,
        parent: PipelineIterator,
        node: GroupByWindow,
        open_group: Callable[[np.int64, list[Element], int], PipelineIterator],
    ) -> None:
        self._key = UserCall(node.key_func, "group_by_window")
        self._node = node
        self._open = open_group
        super().__init__(parent)

    @override
    def _restart(self) -> None:
        self._stop()
        self._groups: dict[int, list[Element]] = {}
        self._sizes: dict[int, int] = {}
        self._opened = 0
        self._ended = False

    @override
    def _is_empty(self) -> bool:
        # The number of a group is part of its order, if the user's function shuffles.
        return self._inner is None and not self._groups and not self._opened

    @override
    def _make(self) -> Element:
        while True:
            if self._inner is not None:
                try:
                    return next(self._inner)
                except StopIteration:
                    self._stop()
            elif not self._ended:
                self._read()
            elif self._groups:
                self._open_group(min(self._groups))
            else:
                raise StopIteration

    def _read(self) -> None:
        try:
            element = self._next()
        except StopIteration:
            self._ended = True
            return
        key = int(np.asarray(self._key(element)))
        group = self._groups.setdefault(key, [])
        if not group:
            self._sizes[key] = self._size_of(key)
        group.append(element)
        if len(group) >= self._sizes[key]:
            self._open_group(key)

    def _size_of(self, key: int) -> int:
        size = int(np.asarray(self._node.window_size(np.int64(key))))
        if size < 1:
            raise ValueError(
                f"window_size_func returned {size} for the key {key}. Expected at least 1."
            )
        return size

    def _open_group(self, key: int) -> None:
        group = self._groups.pop(key)
        self._inner = self._open(np.int64(key), group, self._opened)
        self._opened += 1

    @override
    def _stop(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()


class RebatchIterator(ReplayStage):
    """Batches of rows of batches."""

    def __init__(self, parent: PipelineIterator, node: Rebatch) -> None:
        self._node = node
        super().__init__(parent)

    @override
    def _restart(self) -> None:
        self._turn = 0
        self._left: Element = None
        self._num_left = 0

    @override
    def _is_empty(self) -> bool:
        return not self._num_left and not self._turn

    @override
    def _make(self) -> Element:
        size = self._node.sizes[self._turn]
        parts: list[Element] = []
        missing = size
        while missing:
            if not self._num_left and not self._read():
                break
            taken = min(missing, self._num_left)
            parts.append(elements.take_rows(self._left, 0, taken))
            self._left = elements.take_rows(self._left, taken, self._num_left)
            self._num_left -= taken
            missing -= taken
        if not parts or (missing and self._node.drop_remainder):
            raise StopIteration
        self._turn = (self._turn + 1) % len(self._node.sizes)
        if len(parts) == 1:
            return parts[0]
        return elements.map_leaves(lambda *leaves: np.concatenate(leaves), *parts)

    def _read(self) -> bool:
        while not self._num_left:
            try:
                self._left = self._next()
            except StopIteration:
                return False
            self._num_left = elements.count_rows(self._left)
        return True

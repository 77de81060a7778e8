"""Elements of several inputs, in an order that another input gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.execution.context import State
from distribax.data.execution.iterators.pipeline_iterator import PipelineIterator


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
    def get_state(self) -> State:
        return State(
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

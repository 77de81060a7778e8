"""A small interpreter of pipelines in plain Python, to compare the real one with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distribax.data import Dataset

Values = list[Any]


@dataclass(frozen=True)
class Step:
    """One step: how a data set does it, and how it is done on a list of ints or lists."""

    name: str
    apply: Callable[[Dataset], Dataset]
    expect: Callable[[Values], Values]

    def __repr__(self) -> str:
        return self.name


def interleaved(inputs: list[Values], cycle: int, block: int) -> Values:
    """Returns the elements of lists in turns, as tf.data's interleave gives them."""
    waiting = [list(values) for values in inputs]
    slots: list[Values | None] = [None] * cycle
    result: Values = []
    place = 0
    while waiting or any(slot is not None for slot in slots):
        slot = slots[place]
        if slot is None:
            if waiting:
                slots[place] = waiting.pop(0)
                continue
        else:
            taken, slots[place] = slot[:block], slot[block:]
            result += taken
            if len(taken) < block:
                slots[place] = None
        place = (place + 1) % cycle
    return result


def batched(values: Values, size: int, drop: bool) -> Values:
    """Returns consecutive values in lists."""
    batches = [values[i : i + size] for i in range(0, len(values), size)]
    return [batch for batch in batches if len(batch) == size] if drop else batches


def plain(element: Any) -> Any:
    """Returns an element as Python values."""
    if isinstance(element, tuple):
        return tuple(plain(part) for part in element)
    if isinstance(element, dict):
        return {key: plain(part) for key, part in element.items()}
    return element.tolist() if hasattr(element, "tolist") else element


def values_of(dataset: Dataset) -> Values:
    """Returns all elements as Python values."""
    with dataset.make_iterator() as iterator:
        return [plain(element) for element in iterator]

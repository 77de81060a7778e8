"""Elements of several data sets, in an order that another one gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.plan.order import Zip
from distribax.data.plan.plan_node import CombiningNode, HasPlan, Node
from distribax.data.plan.sources import RandomNumbers
from distribax.data.plan.transforms import Map

_NUM_RANDOM_NUMBERS = 2**32


@dataclass(frozen=True, eq=False)
class Choose(CombiningNode):
    """Each element from the part whose number `choice` gives next."""

    label_format = "choose"
    choice: Node
    stop_on_empty: bool

    @property
    @override
    def inputs(self) -> tuple[Node, ...]:
        return (self.choice, *self.parts)

    @override
    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        choice, *parts = inputs
        return Choose(tuple(parts), choice, self.stop_on_empty)


def parse_parts(datasets: Sequence[HasPlan]) -> tuple[Node, ...]:
    """Returns the plans of data sets to choose from."""
    for dataset in datasets:
        if not isinstance(dataset, HasPlan):
            raise TypeError(
                f"datasets has {elements.shorten(dataset)} of type {type(dataset).__name__} in it. "
                "Expected a list of Datasets."
            )
    if not datasets:
        raise ValueError("datasets=[] has no data set. Expected at least one.")
    return tuple(dataset.plan for dataset in datasets)


def drop_unweighted(
    parts: tuple[Node, ...], weights: Sequence[float] | np.ndarray[Any, Any] | None
) -> tuple[tuple[Node, ...], np.ndarray[Any, Any]]:
    """Returns the parts that can be drawn, and their weights."""
    shares = np.asarray(np.ones(len(parts)) if weights is None else weights, np.float64)
    _parse(shares, len(parts))
    kept = tuple(part for part, share in zip(parts, shares, strict=True) if share)
    return kept, shares[shares > 0]


def draw(
    numbers: RandomNumbers,
    weights: np.ndarray[Any, Any] | Node,
    num_parts: int,
) -> Node:
    """Returns a plan of numbers of parts, drawn by weights or by a plan of weights."""
    if isinstance(weights, Node):
        pairs = Zip((weights, numbers), tuple)
        return Map(pairs, lambda shares, number: _pick(_parse(shares, num_parts), number))
    limits = _parse(weights, num_parts)
    return Map(numbers, lambda number: _pick(limits, number))


def _parse(weights: object, num_parts: int) -> np.ndarray[Any, Any]:
    """Returns for each part the share of all numbers that are below its own."""
    shares = np.asarray(weights, np.float64)
    if shares.shape != (num_parts,) or (shares < 0).any() or not shares.sum() > 0:
        raise ValueError(
            f"weights={elements.shorten(weights)} does not fit {num_parts} data sets. Expected a "
            "number of at least 0 for each, one of them more."
        )
    return np.cumsum(shares) / shares.sum()


def _pick(limits: np.ndarray[Any, Any], number: np.int64) -> np.int64:
    return np.int64(np.searchsorted(limits, number / _NUM_RANDOM_NUMBERS, side="right"))

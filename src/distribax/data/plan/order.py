"""Steps that choose, order and combine elements without changing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from distribax.data import elements
from distribax.data.dataset_options import SHARD_HINT
from distribax.data.element_spec import Spec
from distribax.data.plan.passes import Passes
from distribax.data.plan.plan_node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    CombiningNode,
    HasPlan,
    Node,
    Probe,
    UnaryNode,
)


@dataclass(frozen=True, eq=False)
class Shuffle(UnaryNode):
    """Elements in an order drawn from a buffer of `buffer_size`; None holds all of them."""

    buffer_size: int | None
    seed: int | None = None
    reshuffle_each_iteration: bool = True
    passes: Passes = field(default_factory=Passes)

    @property
    @override
    def label(self) -> str:
        size = "all" if self.buffer_size is None else self.buffer_size
        return f"shuffle({size})"


@dataclass(frozen=True, eq=False)
class Repeat(UnaryNode):
    """The input `count` times; None for endlessly."""

    count: int | None

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE_CARDINALITY
        return size * self.count if size > 0 else size

    @property
    @override
    def label(self) -> str:
        return f"repeat({'' if self.count is None else self.count})"


@dataclass(frozen=True, eq=False)
class Take(UnaryNode):
    """The first `count` elements."""

    label_format = "take({node.count})"
    count: int

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == INFINITE_CARDINALITY:
            return self.count
        return min(size, self.count) if size >= 0 else size


@dataclass(frozen=True, eq=False)
class Skip(UnaryNode):
    """All but the first `count` elements."""

    label_format = "skip({node.count})"
    count: int

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        return max(0, size - self.count) if size >= 0 else size


@dataclass(frozen=True, eq=False)
class Shard(UnaryNode):
    """Every `num_shards`-th element, from number `index` on; SHARD_HINT waits for a rewrite."""

    label_format = "shard({node.num_shards}, {node.index})"
    num_shards: int
    index: int

    @property
    def is_hint(self) -> bool:
        """Whether auto-sharding is to fill in the numbers."""
        return self.num_shards == SHARD_HINT

    @override
    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size < 0 or self.is_hint:
            return size
        return max(0, -((self.index - size) // self.num_shards))


@dataclass(frozen=True, eq=False)
class Concatenate(CombiningNode):
    """One input after the other."""

    label_format = "concatenate"

    @override
    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        if INFINITE_CARDINALITY in sizes:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in sizes else sum(sizes)


@dataclass(frozen=True, eq=False)
class Zip(CombiningNode):
    """Elements of several inputs side by side, in the structure that `build` makes of them."""

    label_format = "zip"
    build: Callable[[list[Any]], Any]

    @override
    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        if 0 in sizes or UNKNOWN_CARDINALITY not in sizes:
            finite = [size for size in sizes if size != INFINITE_CARDINALITY]
            return min(finite) if finite else INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY

    @override
    def spec(self, probe: Probe) -> Spec:
        return self.build([part.spec(probe) for part in self.parts])


def zip_plans(nest: object) -> Zip:
    """Returns a step that reads a nest of data sets side by side, in the structure of the nest."""
    parts = elements.list_leaves(nest)
    for part in parts:
        if not isinstance(part, HasPlan):
            raise TypeError(
                f"zip was given {part!r} of type {type(part).__name__}. Expected Datasets, or a "
                "tuple or dict of them."
            )
    if not parts:
        raise ValueError("zip was given no data set. Expected at least one.")

    def build(values: list[Any]) -> Any:
        given = iter(values)
        return elements.map_leaves(lambda _: next(given), nest)

    return Zip(tuple(part.plan for part in parts), build)


@dataclass(frozen=True, eq=False)
class Interleave(UnaryNode):
    """The elements of data sets that a user's function makes, `cycle_length` of them in turns.

    With a cycle of 1 it is flat_map.
    """

    label_format = "interleave({node.cycle_length}, {node.block_length})"
    keeps_count = False
    fn: Callable[..., HasPlan]
    cycle_length: int = 1
    block_length: int = 1
    num_parallel_calls: int | None = None
    # What the user called it, for the notes on errors.
    step: str = "interleave"
    # The data sets that `fn` makes may be shuffled.
    passes: Passes = field(default_factory=Passes)

    def find_plan(self, made: object) -> Node:
        """Returns the plan of what the user's function returned."""
        if not isinstance(made, HasPlan):
            raise TypeError(
                f"the function given to flat_map or interleave returned {made!r} of type "
                f"{type(made).__name__}. Expected a Dataset; to change elements use map."
            )
        return made.plan

    def _find_inner(self, element: elements.Element) -> Node:
        return self.find_plan(elements.call_with_element(self.fn, element))

    def find_first_inner(self, probe: Probe) -> Node | None:
        """Returns the plan made of the first element, if there is one."""
        first = probe(self.input)
        return None if first is None else self._find_inner(first)

    @override
    def spec(self, probe: Probe) -> Spec:
        return self.infer(lambda element: self._find_inner(element).spec(probe), probe, self.step)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        inner = self.find_first_inner(probe)
        return None if inner is None else inner.is_batched(probe)

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        inner = self.find_first_inner(probe)
        return None if inner is None else inner.static_batch_size(probe)

"""Steps that collect elements: windows, groups by a key, batches of another size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.element_spec import DatasetSpec, Spec, merge_specs, resize_batch_dim
from distribax.data.plan.passes import Passes
from distribax.data.plan.plan_node import HasPlan, Node, Probe, UnaryNode
from distribax.data.plan.sources import Items


@dataclass(frozen=True, eq=False)
class Window(UnaryNode):
    """Data sets of consecutive elements, which `wrap` makes of their plans."""

    keeps_batches = False
    size: int
    shift: int
    stride: int
    drop_remainder: bool
    wrap: Callable[[Node], HasPlan]

    @property
    def span(self) -> int:
        """How many elements lie between the first and the last of a window, both included."""
        return (self.size - 1) * self.stride + 1

    @override
    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        if not self.drop_remainder:
            return -(-count // self.shift)
        return 0 if count < self.span else (count - self.span) // self.shift + 1

    @override
    def spec(self, probe: Probe) -> Spec:
        return elements.map_leaves(DatasetSpec, self.input.spec(probe))

    def make(self, window: list[elements.Element]) -> elements.Element:
        """Returns the window of some elements."""
        return elements.map_leaves(lambda *leaves: self.wrap(Items(leaves)), *window)

    @property
    @override
    def label(self) -> str:
        drop = ", drop" if self.drop_remainder else ""
        return f"window({self.size}, {self.shift}, {self.stride}{drop})"


@dataclass(frozen=True, eq=False)
class GroupByWindow(UnaryNode):
    """Elements collected by key, and full groups through a function that makes a data set."""

    label_format = "group_by_window()"
    keeps_count = False
    key_func: Callable[..., Any]
    reduce_func: Callable[[np.int64, Any], HasPlan]
    window_size: Callable[[np.int64], Any]
    wrap: Callable[[Node], HasPlan]
    # All keys, where they are known before an element is.
    keys: Sequence[int] = ()
    # The data sets that `reduce_func` makes may be shuffled.
    passes: Passes = field(default_factory=Passes)

    def find_plan(
        self, key: int | np.int64, group: list[elements.Element], spec: Spec = None
    ) -> Node:
        """Returns the plan that the user's function makes of a group."""
        made = self.reduce_func(np.int64(key), self.wrap(Items(tuple(group), spec)))
        if not isinstance(made, HasPlan):
            raise TypeError(
                f"the reduce_func given to group_by_window returned {elements.shorten(made)} of "
                f"type {type(made).__name__}. Expected a Dataset, for example group.batch(size)."
            )
        return made.plan

    def _find_key(self, element: elements.Element) -> int:
        return int(np.asarray(elements.call_with_element(self.key_func, element)))

    def _find_first_group(self, probe: Probe) -> Node | None:
        first = probe(self.input)
        return None if first is None else self.find_plan(self._find_key(first), [first])

    @override
    def spec(self, probe: Probe) -> Spec:
        given = self.input.spec(probe)

        def merge_groups(element: elements.Element) -> Spec:
            keys = self.keys or [self._find_key(element)]
            groups = [self.find_plan(key, [element], given).spec(probe) for key in keys]
            return functools.reduce(merge_specs, groups)

        return self.infer(merge_groups, probe, "group_by_window")

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        group = self._find_first_group(probe)
        return None if group is None else group.is_batched(probe)

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        return None


@dataclass(frozen=True, eq=False)
class Rebatch(UnaryNode):
    """Batches of other sizes, which take turns."""

    keeps_count = False
    sizes: tuple[int, ...]
    drop_remainder: bool

    @override
    def spec(self, probe: Probe) -> Spec:
        is_fixed = len(self.sizes) == 1 and self.drop_remainder
        return resize_batch_dim(self.input.spec(probe), self.sizes[0] if is_fixed else None)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return True

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        return self.sizes[0] if len(self.sizes) == 1 else None

    @property
    @override
    def label(self) -> str:
        return f"rebatch({list(self.sizes)}{', drop' if self.drop_remainder else ''})"

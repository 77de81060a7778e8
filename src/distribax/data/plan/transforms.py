"""Steps that change elements: map, filter, batch and their like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.dataset_options import Options
from distribax.data.element_spec import (
    Spec,
    TensorSpec,
    add_batch_dim,
    find_spec,
    remove_batch_dim,
)
from distribax.data.elements import call_with_element, from_return
from distribax.data.plan.plan_node import (
    UNKNOWN_CARDINALITY,
    HasPlan,
    Node,
    Probe,
    UnaryNode,
)
from distribax.data.plan.stores import CacheStore, FileStore, MemoryStore


@dataclass(frozen=True, eq=False)
class Map(UnaryNode):
    """Every element through a user's function, by several threads if asked."""

    label_format = "map()"
    fn: Callable[..., Any]
    num_parallel_calls: int | None = None
    # What the function returns, where that is known without calling it.
    known_spec: Spec = None

    @override
    def spec(self, probe: Probe) -> Spec:
        if self.known_spec is not None:
            return self.known_spec
        return self.infer(
            lambda element: find_spec(from_return(call_with_element(self.fn, element))),
            probe,
            "map",
        )

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        batched = self.input.is_batched(probe)
        if batched is False and self.input.static_batch_size(probe) is not None:
            # There are batches in the elements, such as those that have a number: the function may
            # take them out.
            return None
        return batched


@dataclass(frozen=True, eq=False)
class Filter(UnaryNode):
    """The elements for which a user's predicate is true."""

    label_format = "filter()"
    keeps_count = False
    predicate: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Batching(UnaryNode):
    """Consecutive elements stacked into one."""

    batch_size: int
    drop_remainder: bool = False

    @override
    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.batch_size if self.drop_remainder else -(-count // self.batch_size)

    @override
    def spec(self, probe: Probe) -> Spec:
        size = self.batch_size if self.drop_remainder else None
        return add_batch_dim(self.input.spec(probe), size)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return True

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        return self.batch_size

    @property
    @override
    def label(self) -> str:
        return f"batch({self.batch_size}{', drop' if self.drop_remainder else ''})"


@dataclass(frozen=True, eq=False)
class PaddedBatching(Batching):
    """Like Batching, for elements of different shapes, which are padded to one."""

    padded_shapes: Any = None
    padding_values: Any = None

    @override
    def spec(self, probe: Probe) -> Spec:
        size = self.batch_size if self.drop_remainder else None
        rows = self.input.spec(probe)
        if self.padded_shapes is None:
            # The sizes of the first element say nothing about those of the others.
            padded = elements.map_leaves(
                lambda leaf: TensorSpec((None,) * len(leaf.shape), leaf.dtype), rows
            )
        else:
            padded = elements.map_leaves(
                lambda leaf, dims: TensorSpec(dims.dims, leaf.dtype), rows, self.padded_shapes
            )
        return add_batch_dim(padded, size)

    @property
    @override
    def label(self) -> str:
        return f"padded_{super().label}"


class _NeedsRunning(Exception):
    """Only running the pipeline could tell."""


def _refuse(node: Node) -> elements.Element | None:
    raise _NeedsRunning


@dataclass(frozen=True, eq=False)
class Unbatch(UnaryNode):
    """The rows of batches, one by one."""

    label_format = "unbatch()"
    keeps_batches = False

    @override
    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count <= 0:
            return count
        batches = strip_options(self.input)
        if isinstance(batches, Batching) and batches.drop_remainder:
            return count * batches.batch_size
        try:
            spec = self.input.spec(_refuse)
        except _NeedsRunning:
            return UNKNOWN_CARDINALITY
        sizes = {leaf.shape[0] if leaf.shape else None for leaf in elements.list_leaves(spec)}
        size = sizes.pop() if len(sizes) == 1 else None
        return UNKNOWN_CARDINALITY if size is None else count * size

    @override
    def spec(self, probe: Probe) -> Spec:
        return remove_batch_dim(self.input.spec(probe))


@dataclass(frozen=True, eq=False)
class Enumerate(UnaryNode):
    """Every element with its number."""

    label_format = "enumerate({node.start})"
    start: int = 0

    @override
    def spec(self, probe: Probe) -> Spec:
        return (TensorSpec((), np.int64), self.input.spec(probe))

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        # The number has no batch dimension, so such elements cannot be split.
        return False


@dataclass(frozen=True, eq=False)
class Prefetch(UnaryNode):
    """Elements made ahead of use by a background thread."""

    buffer_size: int


@dataclass(frozen=True, eq=False)
class Cache(UnaryNode):
    """Elements kept after the first complete iteration, in memory or in a file."""

    label_format = "cache()"
    filename: str = ""
    store: CacheStore = field(init=False)

    def __post_init__(self) -> None:
        store = FileStore(self.filename) if self.filename else MemoryStore()
        object.__setattr__(self, "store", store)

    @override
    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        # Other inputs are other elements: what was kept so far must not answer for them.
        (only,) = inputs
        return self if only is self.input else Cache(only, self.filename)


@dataclass(frozen=True, eq=False)
class Snapshot(UnaryNode):
    """Elements written to a directory by the first complete iteration, and read from it after."""

    label_format = "snapshot()"
    path: str
    compression: str | None
    shard_func: Callable[..., Any] | None
    reader_func: Callable[[Any], HasPlan] | None
    wrap: Callable[[Node], HasPlan]


@dataclass(frozen=True, eq=False)
class WithOptions(UnaryNode):
    """Options attached to the pipeline so far."""

    options: Options


def merge_options(node: Node) -> Options:
    """Returns the options of a plan; of two settings the later in the pipeline counts."""
    merged = Options()
    for child in node.inputs:
        merged = merged.merge(merge_options(child))
    return merged.merge(node.options) if isinstance(node, WithOptions) else merged


def strip_options(node: Node) -> Node:
    """Returns the node below any attached options."""
    while isinstance(node, WithOptions):
        node = node.input
    return node


def replace_inputs(node: Node, change: Callable[[Node], Node]) -> Node:
    """Returns the node with `change` applied to each of its inputs."""
    changed = tuple(change(child) for child in node.inputs)
    same = all(new is old for new, old in zip(changed, node.inputs, strict=True))
    return node if same else node.with_inputs(changed)

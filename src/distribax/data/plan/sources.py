"""Where a pipeline begins: arrays in memory, counters, generators, files, foreign iterables."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.element_spec import (
    Spec,
    TensorSpec,
    find_spec,
    merge_specs,
    remove_batch_dim,
    resize_batch_dim,
)
from distribax.data.formats.record_format import RecordFormat
from distribax.data.plan.passes import Passes
from distribax.data.plan.plan_node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Node,
    Probe,
    UnknownSpecError,
)
from distribax.data.write_protection import align_rows, keep_as_given
from distribax.topology.host_memory import make_aligned


class IndexedSource(Node):
    """A source of known length that can give any element: order is chosen before reading."""

    @abc.abstractmethod
    def element(self, index: int) -> elements.Element:
        """Returns one element."""

    def rows(self, indices: range | np.ndarray[Any, Any]) -> elements.Element:
        """Returns a batch of the elements at `indices`."""
        if not len(indices):
            return elements.take_rows(elements.stack([self.element(0)]), 0, 0)
        return elements.stack([self.element(int(index)) for index in indices])


def _pick_rows(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns rows of an array; a large batch in memory that devices can use as it is."""
    if array.dtype.hasobject:
        return array.take(indices, axis=0)
    rows = make_aligned((len(indices), *array.shape[1:]), array.dtype)
    # Positions are always valid; "clip" only spares NumPy a buffer of its own.
    return np.take(array, indices, axis=0, out=rows, mode="clip")


@dataclass(frozen=True, eq=False)
class Slices(IndexedSource):
    """The rows of arrays in memory."""

    label_format = "from_tensor_slices({node.size})"
    arrays: elements.Element
    size: int = field(init=False)

    def __post_init__(self) -> None:
        arrays = elements.list_leaves(self.arrays)
        if not arrays:
            raise ValueError(
                f"tensors={self.arrays!r} has no component. Expected at least one array."
            )
        if any(np.ndim(array) == 0 for array in arrays):
            raise ValueError(
                f"tensors has a component without rows: {elements.describe(self.arrays)}. Every "
                "component needs at least one dimension; for a single element use from_tensors."
            )
        sizes = {len(array) for array in arrays}
        if len(sizes) != 1:
            raise ValueError(
                "tensors has components with different numbers of rows: "
                f"{elements.describe(self.arrays)}. They must agree in their first dimension."
            )
        object.__setattr__(self, "arrays", align_rows(keep_as_given(self.arrays)))
        object.__setattr__(self, "size", sizes.pop())

    @override
    def cardinality(self) -> int:
        return self.size

    @override
    def element(self, index: int) -> elements.Element:
        if type(self.arrays) is np.ndarray:
            return self.arrays[index]
        return elements.map_leaves(lambda array: array[index], self.arrays)

    @override
    def rows(self, indices: range | np.ndarray[Any, Any]) -> elements.Element:
        if isinstance(indices, range):
            picked = _as_slice(indices)
            return elements.map_leaves(
                lambda array: np.ascontiguousarray(array[picked]), self.arrays
            )
        return elements.map_leaves(lambda array: _pick_rows(array, indices), self.arrays)

    @override
    def spec(self, probe: Probe) -> Spec:
        return remove_batch_dim(find_spec(self.arrays))


def _as_slice(indices: range) -> slice:
    # A stop below zero would count from the end.
    stop = indices.stop if indices.stop >= 0 else None
    return slice(indices.start, stop, indices.step)


@dataclass(frozen=True, eq=False)
class Tensors(IndexedSource):
    """One element."""

    label_format = "from_tensors()"
    value: elements.Element

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", keep_as_given(self.value))

    @override
    def cardinality(self) -> int:
        return 1

    @override
    def element(self, index: int) -> elements.Element:
        return self.value

    @override
    def spec(self, probe: Probe) -> Spec:
        return find_spec(self.value)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return self._num_rows is not None

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        return self._num_rows

    @property
    def _num_rows(self) -> int | None:
        """The rows of the element, if it is a batch: all components have as many."""
        sizes = {np.shape(leaf)[:1] for leaf in elements.list_leaves(self.value)}
        (size,) = sizes if len(sizes) == 1 else ((),)
        return size[0] if size else None


@dataclass(frozen=True, eq=False)
class Range(IndexedSource):
    """The integers of a Python range."""

    label_format = "range({node.values.start}, {node.values.stop}, {node.values.step})"
    values: range
    dtype: np.dtype[Any]

    @override
    def cardinality(self) -> int:
        return len(self.values)

    @override
    def element(self, index: int) -> elements.Element:
        return self.dtype.type(self.values[index])

    @override
    def rows(self, indices: range | np.ndarray[Any, Any]) -> elements.Element:
        if isinstance(indices, range):
            picked = self.values[_as_slice(indices)]
            return np.arange(picked.start, picked.stop, picked.step, dtype=self.dtype)
        return (self.values.start + self.values.step * indices).astype(self.dtype)

    @override
    def spec(self, probe: Probe) -> Spec:
        return TensorSpec((), self.dtype)


@dataclass(frozen=True, eq=False)
class Items(IndexedSource):
    """Elements that other steps have made: those of a window, or data sets of files."""

    items: tuple[elements.Element, ...]
    # The spec that covers others of their kind, too.
    known_spec: Spec = None

    @override
    def cardinality(self) -> int:
        return len(self.items)

    @override
    def element(self, index: int) -> elements.Element:
        return self.items[index]

    @override
    def spec(self, probe: Probe) -> Spec:
        if self.known_spec is not None:
            return self.known_spec
        first, *others = map(find_spec, self.items)
        return functools.reduce(merge_specs, others, first)

    @property
    @override
    def label(self) -> str:
        return f"items({len(self.items)})"


@dataclass(frozen=True, eq=False)
class Counter(Node):
    """Whole numbers without end."""

    label_format = "counter({node.start}, {node.step})"
    start: int
    step: int
    dtype: np.dtype[Any]

    @override
    def cardinality(self) -> int:
        return INFINITE_CARDINALITY

    @override
    def spec(self, probe: Probe) -> Spec:
        return TensorSpec((), self.dtype)


@dataclass(frozen=True, eq=False)
class RandomNumbers(Node):
    """Random whole numbers of 32 bits, without end."""

    label_format = "random()"
    seed: int | None
    reshuffle_each_iteration: bool
    passes: Passes = field(default_factory=Passes)

    @override
    def cardinality(self) -> int:
        return INFINITE_CARDINALITY

    @override
    def spec(self, probe: Probe) -> Spec:
        return TensorSpec((), np.int64)


@dataclass(frozen=True, eq=False)
class FileNames(Slices):
    """The names of files, as `list_files` gives them: auto-sharding may divide them."""

    label_format = "list_files({node.size})"


@dataclass(frozen=True, eq=False)
class Batches(Items):
    """A list whose items are batches already."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(keep_as_given(item) for item in self.items))

    @override
    def spec(self, probe: Probe) -> Spec:
        return resize_batch_dim(find_spec(self.items[0]), None)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return True

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        return elements.count_rows(self.items[0])

    @property
    @override
    def label(self) -> str:
        return f"batches({len(self.items)})"


@dataclass(frozen=True, eq=False)
class GeneratorSource(Node):
    """What a Python function yields; it is called again for every iteration."""

    label_format = "from_generator()"
    make: Callable[[], Iterable[Any]]
    signature: Spec = None
    # Data types in the structure of the elements, where only they were given.
    types: Any = None

    @override
    def spec(self, probe: Probe) -> Spec:
        return self.signature if self.signature is not None else probe_spec(self, probe)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return None


def probe_spec(node: Node, probe: Probe) -> Spec:
    """Returns the spec of a source's first element."""
    first = probe(node)
    if first is None:
        raise UnknownSpecError(
            f"the element_spec of {node.label} cannot be known: it yields no element. Give its "
            "spec, for example from_generator(fn, output_signature=dx.data.TensorSpec(...))."
        )
    return find_spec(first)


@dataclass(frozen=True, eq=False)
class FileReader(Node):
    """The records of files, in the order of the files.

    With `cycle_length` above 1 that many files are read in turns, record by record.
    """

    filenames: tuple[str, ...]
    format: RecordFormat[Any]
    cycle_length: int = 1
    # How many records each file has, where that is known.
    counts: Mapping[str, int] | None = None
    # Whether the records are batches; None if only they can tell.
    batched: bool | None = False

    @override
    def cardinality(self) -> int:
        if self.counts is None:
            return UNKNOWN_CARDINALITY
        return sum(self.counts[name] for name in self.filenames)

    @override
    def spec(self, probe: Probe) -> Spec:
        known = self.format.spec
        return known if known is not None else probe_spec(self, probe)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return self.batched

    @property
    @override
    def label(self) -> str:
        return f"{self.format.name}({len(self.filenames)} files, cycle {self.cycle_length})"


@dataclass(frozen=True, eq=False)
class RandomAccessFiles(IndexedSource):
    """The records of files that can be read in any order."""

    filenames: tuple[str, ...]
    name: str
    open: Callable[[tuple[str, ...]], Any]
    record_spec: Spec

    @functools.cached_property
    def source(self) -> Any:
        """The opened files."""
        return self.open(self.filenames)

    @override
    def cardinality(self) -> int:
        return len(self.source)

    @override
    def element(self, index: int) -> elements.Element:
        return self.source[index]

    @override
    def spec(self, probe: Probe) -> Spec:
        return self.record_spec

    @property
    @override
    def label(self) -> str:
        return f"{self.name}({len(self.filenames)} files)"


@dataclass(frozen=True, eq=False)
class Foreign(Node):
    """Batches from an iterable that is not ours: a generator, a loader, another library's data set.

    `kind` names it in messages. `start` begins an iteration; `save` and `load` carry the
    position of such an iteration, where the iterable has one.
    """

    label_format = "<{node.kind}>"
    kind: str
    start: Callable[[], Iterator[Any]]
    repeatable: bool = True
    save: Callable[[Any], Any] | None = None
    load: Callable[[Any, Any], Iterator[Any]] | None = None
    length: int = UNKNOWN_CARDINALITY
    signature: Spec = None
    # Whether it may fill the same arrays again for the next batch.
    reuses_arrays: bool = False

    @override
    def cardinality(self) -> int:
        return self.length

    @override
    def spec(self, probe: Probe) -> Spec:
        if self.signature is not None:
            return self.signature
        return resize_batch_dim(probe_spec(self, probe), None)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return None

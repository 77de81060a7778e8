"""Iterators at the beginning of a pipeline: generators, files, foreign iterables."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.element_spec import TensorSpec
from distribax.data.elements import Element
from distribax.data.formats.record_format import RecordReader
from distribax.data.plan.sources import FileReader, Foreign, GeneratorSource
from distribax.data.runtime import permutation
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.pass_context import IteratorState, Progress
from distribax.data.runtime.permutation import Key
from distribax.data.write_protection import copy_changeable


class CountingSource(PipelineIterator):
    """A source whose position is a count: to resume, it is started again and read up to there."""

    _iterator: Iterator[Any] | None = None

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._given = 0

    @abc.abstractmethod
    def _start(self) -> Iterator[Any]: ...

    @abc.abstractmethod
    def _convert(self, value: object) -> Element: ...

    @override
    def __next__(self) -> Element:
        if self._iterator is None:
            self._iterator = self._start()
        value = next(self._iterator)
        self._progress.num_given += 1
        element = self._convert(value)
        self._given += 1
        return element

    @override
    def _stop(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()
        self._iterator = None

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(given=self._given)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._given = state["given"]
        if self._given:
            self._iterator = self._start()
            for _ in range(self._given):
                next(self._iterator)


class GeneratorIterator(CountingSource):
    """What a user's generator function yields, checked against its signature."""

    def __init__(self, node: GeneratorSource, progress: Progress) -> None:
        super().__init__(progress)
        self._node = node

    @override
    def _start(self) -> Iterator[Any]:
        made = self._node.make()
        if not hasattr(made, "__iter__") and not hasattr(made, "__getitem__"):
            raise TypeError(
                f"the function given as generator to from_generator returned {made!r} of type "
                f"{type(made).__name__}. Expected something to iterate over: write it with yield, "
                "or return a list or an iterator."
            )
        return iter(made)

    @override
    def _convert(self, value: object) -> Element:
        if self._node.signature is not None:
            return copy_changeable(elements.map_leaves(_fit, self._node.signature, _as_nest(value)))
        if self._node.types is not None:
            return copy_changeable(
                elements.map_leaves(_convert_dtype, self._node.types, _as_nest(value))
            )
        return copy_changeable(elements.from_return(value))


def _as_nest(value: object) -> Element:
    return tuple(value) if type(value) is list else value


def _fit(spec: TensorSpec, value: object) -> Element:
    leaf = _convert_dtype(spec.dtype, value)
    if isinstance(leaf, dict) or not spec.is_compatible_with(leaf):
        raise ValueError(
            f"the generator yielded {elements.describe(leaf)}, which does not fit its "
            f"output_signature {spec}. Yield what it says, or change output_signature."
        )
    return leaf


def _convert_dtype(dtype: np.dtype[Any], value: object) -> Any:
    leaf = _widen(value)
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype == dtype:
        return leaf
    if not leaf.size and isinstance(value, (list, tuple)):
        return np.empty(leaf.shape, dtype)  # An empty list has no type of its own.
    if dtype.kind not in "biufc" or leaf.dtype.kind not in "biufc":
        return leaf
    with np.errstate(invalid="ignore", over="ignore"):
        converted = leaf.astype(dtype)
    # Narrowing a float is what a signature is for; cutting off a fraction or high bits is not.
    harmless = dtype.kind not in "iu" and np.can_cast(leaf.dtype, dtype, "same_kind")
    if harmless or np.array_equal(converted, leaf):
        return converted
    raise TypeError(
        f"the generator yielded {elements.shorten(value)} of dtype {leaf.dtype} where its "
        f"output_signature or output_types says {dtype}, and it cannot be converted without loss. "
        "Change one of the two."
    )


def _widen(value: object) -> Element:
    """Returns a leaf; Python numbers in full width, as the signature says what they become."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, (list, int, float)):
        with contextlib.suppress(ValueError):
            array = np.asarray(value)
            if array.dtype.kind in "iuf":
                return array[()]
    return elements.to_element(value)


class CounterIterator(PipelineIterator):
    """Numbers without end; its state is how many came."""

    def __init__(self, make: Callable[[int], Element], progress: Progress) -> None:
        super().__init__()
        self._make = make
        self._progress = progress
        self._given = 0

    @override
    def __next__(self) -> Element:
        self._given += 1
        self._progress.num_given += 1
        return self._make(self._given - 1)

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(given=self._given)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._given = state["given"]


class RandomNumbersOf:
    """The random numbers of a pass, by their place; they are made in blocks."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._number = -1
        self._block = np.empty(0, np.int64)

    def __call__(self, place: int) -> np.int64:
        number, offset = divmod(place, permutation.BLOCK_SIZE)
        if number != self._number:
            self._number, self._block = number, permutation.draw_block(self._key, number)
        return np.int64(self._block[offset])


class FileIterator(PipelineIterator):
    """The records of files, one file after the other."""

    _reader: RecordReader[Any] | None = None

    def __init__(self, node: FileReader, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._node = node
        self._file = 0
        self._offset: Any = None

    @override
    def __next__(self) -> Element:
        while True:
            if self._reader is None:
                if self._file >= len(self._node.filenames):
                    raise StopIteration
                self._reader = self._node.format.open(
                    self._node.filenames[self._file], self._offset
                )
            try:
                record = next(self._reader)
            except StopIteration:
                self._stop()
                self._file, self._offset = self._file + 1, None
            else:
                self._progress.num_given += 1
                return record

    @override
    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    @override
    def get_state(self) -> IteratorState:
        offset = self._offset if self._reader is None else self._reader.offset
        return IteratorState(file=self._file, offset=offset)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._file, self._offset = state["file"], state["offset"]


class ForeignIterator(CountingSource):
    """Batches of a foreign iterable, turned into NumPy."""

    def __init__(self, node: Foreign, progress: Progress) -> None:
        super().__init__(progress)
        self._node = node

    @override
    def _start(self) -> Iterator[Any]:
        return self._node.start()

    @override
    def _convert(self, value: object) -> Element:
        element = _to_nest(value)
        return copy_changeable(element) if self._node.reuses_arrays else element

    @override
    def get_state(self) -> IteratorState:
        if self._node.save is None:
            return IteratorState(given=self._given)
        if self._iterator is None:
            self._iterator = self._start()
        return IteratorState(given=self._given, saved=self._node.save(self._iterator))

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        # Positions of what cannot be resumed are refused when they are asked for.
        assert self._node.load is not None, self._node.kind
        if self._iterator is None:
            self._iterator = self._start()
        self._iterator = self._node.load(self._iterator, state["saved"])
        self._given = state["given"]


def _to_nest(value: object) -> Element:
    # Loaders collate pairs into lists, where a list stands for a tuple at every level.
    if isinstance(value, list) and any(hasattr(item, "__array__") for item in value):
        return tuple(_to_nest(item) for item in value)
    if isinstance(value, tuple) and not elements.is_namedtuple(value):
        return tuple(_to_nest(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_nest(item) for key, item in value.items()}
    return elements.to_element(value)

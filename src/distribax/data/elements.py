"""Elements of a data set: nests (tuples, named tuples, dicts) whose leaves are NumPy values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from distribax.variables.creation import forbid

Leaf: TypeAlias = np.ndarray[Any, Any] | np.generic | bytes
"""A component of an element."""


class DatasetLeaf:
    """A component that is itself a data set, such as a window."""


Element: TypeAlias = object
"""A nest (tuples, named tuples, dicts) of leaves."""

_BYTES_DTYPE = np.dtype(object)
_INT32 = np.iinfo(np.int32)


def is_namedtuple(value: object) -> bool:
    """Tells whether `value` is an instance of a named tuple's class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def map_leaves(fn: Callable[..., Any], nest: Element, *others: Any) -> Any:
    """Applies `fn` to the leaves of one or several nests of the same structure."""
    if isinstance(nest, tuple):
        if others:
            _check_structures(nest, others)
        mapped = [map_leaves(fn, *parts) for parts in zip(nest, *others, strict=True)]
        return type(nest)(*mapped) if is_namedtuple(nest) else tuple(mapped)
    if isinstance(nest, dict):
        if others:
            _check_structures(nest, others)
        return {key: map_leaves(fn, nest[key], *(o[key] for o in others)) for key in nest}
    return fn(nest, *others)


def list_leaves(nest: Element) -> list[Any]:
    """Returns the leaves of a nest, in order (dicts in their own order)."""
    if isinstance(nest, tuple):
        return [leaf for part in nest for leaf in list_leaves(part)]
    if isinstance(nest, dict):
        return [leaf for part in nest.values() for leaf in list_leaves(part)]
    return [nest]


def describe(nest: Element) -> str:
    """Returns the shapes and dtypes of a nest, for error messages."""
    return str(map_leaves(_describe_leaf, nest))


def _describe_leaf(leaf: Leaf | DatasetLeaf) -> str:
    if isinstance(leaf, DatasetLeaf):
        return "a data set"
    return f"{get_dtype(leaf)}{list(np.shape(leaf))}"


def get_dtype(leaf: Leaf) -> np.dtype[Any]:
    """Returns the dtype of a leaf; text and bytes are objects, as in tf.data."""
    return _BYTES_DTYPE if isinstance(leaf, bytes) else leaf.dtype


def to_element(value: object) -> Element:
    """Turns what a user gives or returns into an element, with TensorFlow's dtype rules.

    Python floats become float32, ints int32 (int64 when they do not fit), text becomes bytes,
    lists become arrays; NumPy values keep their dtype; JAX and other arrays are fetched.
    """
    # Not of a subclass: those are converted like other arrays.
    if isinstance(value, np.ndarray) and type(value) is np.ndarray:
        return value if value.dtype.kind not in "USO" else _to_bytes_array(value)
    if isinstance(value, np.generic):
        return value if value.dtype.kind not in "US" else _to_bytes(value.item())
    if isinstance(value, tuple):
        parts: list[Any] = [to_element(part) for part in value]
        return type(value)(*parts) if is_namedtuple(value) else tuple(parts)
    if isinstance(value, Mapping):
        return {key: to_element(part) for key, part in value.items()}
    if isinstance(value, (bytes, str)):
        return _to_bytes(value)
    return value if isinstance(value, DatasetLeaf) else _to_leaf(value)


def from_return(value: object) -> Element:
    """Like `to_element`, for a user function's result: there a list stands for a tuple."""
    return to_element(tuple(value) if type(value) is list else value)


def _to_leaf(value: object) -> Leaf:
    if value is None or isinstance(value, (set, frozenset)) or callable(value):
        raise _make_element_error(value)
    if isinstance(value, Sequence):
        array = _from_sequence(value)
    else:
        array = np.asarray(value)
        if not hasattr(value, "__array__"):
            array = _narrow(array)
    if array.dtype == _BYTES_DTYPE or array.dtype.kind in "US":
        if array.ndim == 0:
            raise _make_element_error(value)
        return _to_bytes_array(array)
    return array[()] if array.ndim == 0 else array


def _from_sequence(value: Sequence[Any]) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"a list whose items differ in shape cannot become one array: {shorten(value)}. "
            "Pad the items to one shape, or keep them apart in a tuple."
        ) from error
    if array.dtype.kind in "US":
        # Fixed-width text would lose trailing zero bytes, and turn numbers among it into text.
        return np.array(value, _BYTES_DTYPE)
    if array.dtype in (np.float64, np.int64) and not _holds_arrays(value):
        return _narrow(array)
    return array


def _holds_arrays(value: object) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return any(_holds_arrays(item) for item in value)
    return hasattr(value, "dtype")


def _narrow(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Python numbers carry no width: TensorFlow reads them as 32 bits where they fit.
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (
        array.size == 0 or (array.min() >= _INT32.min and array.max() <= _INT32.max)
    ):
        return array.astype(np.int32)
    return array


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _to_bytes_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    items = array.ravel().tolist()
    if all(type(item) is bytes for item in items) and array.dtype == _BYTES_DTYPE:
        return array
    for item in items:
        if not isinstance(item, (str, bytes)):
            raise _make_element_error(item)
    result = np.empty(array.shape, _BYTES_DTYPE)
    result.ravel()[:] = [_to_bytes(item) for item in items]
    return result


def _make_element_error(value: object) -> TypeError:
    return TypeError(
        f"{shorten(value)} of type {type(value).__name__} cannot be part of a data set's element. "
        "Expected arrays, numbers, text or bytes, in tuples, named tuples or dicts."
    )


def shorten(value: object) -> str:
    """Returns how a value reads, for error messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_structures(nest: tuple[Any, ...] | dict[Any, Any], others: Sequence[Any]) -> None:
    kind: type = tuple if isinstance(nest, tuple) else dict
    form: Callable[[Any], object] = len if kind is tuple else dict.keys
    for other in others:
        if not isinstance(other, kind) or form(other) != form(nest):
            raise ValueError(
                f"elements have different structures: {shorten(nest)} and {shorten(other)}. Every "
                "element of a data set needs the same nest of tuples and dicts."
            )


def check_state(before: Element, after: Element, function: str) -> Element:
    """Returns the next state of a reduction, which must have the structure of the last one."""
    try:
        map_leaves(lambda *_: None, before, after)
        map_leaves(lambda *_: None, after, before)
    except ValueError:
        raise TypeError(
            f"{function} returned the state {shorten(after)}, which has another structure than the "
            f"state before it, {shorten(before)}."
        ) from None
    return after


def call_with_element(fn: Callable[..., Any], element: Element) -> Any:
    """Calls a user's function as tf.data does: a plain tuple becomes several arguments."""
    with forbid("a function of a data set"):
        return fn(*element) if type(element) is tuple else fn(element)


def stack(elements: Sequence[Any]) -> Any:
    """Batches elements: every leaf gets a new first dimension."""
    # Written out, as it is called for every batch: map_leaves would take half as long again.
    first = elements[0]
    if isinstance(first, tuple):
        _check_structures(first, elements)
        columns = [stack(column) for column in zip(*elements, strict=True)]
        return type(first)(*columns) if is_namedtuple(first) else tuple(columns)
    if isinstance(first, dict):
        _check_structures(first, elements)
        return {key: stack([element[key] for element in elements]) for key in first}
    return stack_leaves(elements)


def stack_leaves(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Stacks arrays or scalars of one shape and dtype."""
    first = values[0]
    if isinstance(first, DatasetLeaf):
        raise TypeError(
            "data sets, such as the windows that window() makes, cannot be batched. Take their "
            "elements first, for example windows.flat_map(lambda window: window.batch(size))."
        )
    if isinstance(first, bytes):
        if not all(isinstance(value, bytes) for value in values):
            raise _make_dtype_error(values)
        result = np.empty(len(values), _BYTES_DTYPE)
        result[:] = values
        return result
    try:
        # For many small arrays this is three times as fast as np.stack, and it checks the shapes.
        result = np.array(values)
    except ValueError:
        raise _make_shape_error(values) from None
    if result.dtype != first.dtype:
        raise _make_dtype_error(values)
    return result


def _make_dtype_error(values: Sequence[Any]) -> TypeError:
    first, *others = (str(get_dtype(value)) for value in values)
    return TypeError(
        f"cannot batch elements of different dtypes: element 0 of the batch is {first}, "
        f"others are {sorted(set(others))}. Convert them to one dtype with map."
    )


def _make_shape_error(values: Sequence[Any]) -> ValueError:
    shapes = [list(np.shape(value)) for value in values]
    number = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
    return ValueError(
        f"cannot batch elements of different shapes: element 0 of the batch has shape {shapes[0]}, "
        f"element {number} has shape {shapes[number]}. Use padded_batch, or bring them to one "
        "shape with map."
    )


def take_rows(nest: Element, start: int, stop: int) -> Element:
    """Returns rows `start` to `stop` of every leaf, as views."""
    return map_leaves(lambda leaf: leaf[start:stop], nest)


def count_rows(nest: Element) -> int:
    """Returns the batch size of an element; its leaves must agree on a first dimension."""
    sizes: list[int] = []
    for leaf in list_leaves(nest):
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"a component of the element has no batch dimension: {describe(nest)}. Batch the "
                "data set first, for example dataset.batch(global_batch_size)."
            )
        sizes.append(len(leaf))
    if not sizes:
        raise ValueError("the element is an empty nest: it has no batch dimension to split.")
    if min(sizes) != max(sizes):
        raise ValueError(
            f"the components of a batch differ in their first dimension: {describe(nest)}. Every "
            "component must hold the same number of rows."
        )
    return sizes[0]

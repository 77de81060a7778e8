"""Makes data sets of anything iterable: arrays, generators, other libraries' loaders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

import numpy as np

from distribax.data import elements
from distribax.data.dataset import Dataset
from distribax.data.element_spec import TensorSpec
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY
from distribax.data.plan.sources import Batches, Foreign


class _GrainIterator(Iterator[Any], Protocol):
    """What saving needs of Grain's iterators: of data sets, and of data loaders."""

    def get_state(self) -> dict[str, Any] | bytes: ...

    def set_state(self, state: Any, /) -> None: ...


def as_dataset(value: object) -> Dataset:
    """Makes a data set of anything iterable.

    - a `Dataset` is returned as it is;
    - arrays, and tuples and dicts of arrays, give their rows: batch them;
    - everything else gives batches as they come: a list of batches, a function that makes a
      generator, a generator or iterator (once only), Grain data sets and loaders, torch
      DataLoaders, tf.data data sets, any other iterable.

    Grain's iterators can be saved and restored, and so can lists and generator functions; others
    cannot be. Nothing but a `Dataset` of files can be sharded by file.

    Args:
        value: What to iterate over.

    Returns:
        The data set.

    Raises:
        TypeError: `value` cannot be iterated, or is a dict that does not hold arrays.
        ValueError: `value` is an empty list.
    """
    if isinstance(value, Dataset):
        return value
    if isinstance(value, list):
        return _from_batches(value)
    if _is_nest_of_arrays(value):
        return Dataset.from_tensor_slices(value)
    if isinstance(value, dict):  # To iterate it would give its keys.
        raise TypeError(
            f"a data set cannot be made of the dict {value!r}: not all its values are arrays with "
            "rows. Expected a dict of arrays, or a list of such dicts, one for each batch."
        )
    family = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    if "grain" in family and isinstance(value, Iterable):
        return _from_grain(value)
    if "tensorflow" in family and hasattr(value, "as_numpy_iterator"):
        return _from_tensorflow(value)
    if "torch" in family and isinstance(value, Iterable):
        loader = Foreign("a torch DataLoader", lambda: iter(value), length=_find_length(value))
        return Dataset(loader)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return _from_iterable(value)
    if callable(value):
        return Dataset.from_generator(value)
    raise TypeError(
        f"a data set cannot be made of {value!r} of type {type(value).__name__}. Expected a "
        "dx.data.Dataset, arrays, or something that can be iterated."
    )


def _is_nest_of_arrays(value: object) -> bool:
    if isinstance(value, (tuple, dict)):
        return all(
            _is_nest_of_arrays(leaf) or isinstance(leaf, list)
            for leaf in elements.list_leaves(value)
        )
    return hasattr(value, "__array__") and np.ndim(value) > 0


def _from_batches(batches: list[Any]) -> Dataset:
    if not batches:
        raise ValueError("the list of batches is empty. Expected at least one batch.")
    items = tuple(elements.from_return(batch) for batch in batches)
    for item in items:
        elements.count_rows(item)
    return Dataset(Batches(items))


def _find_length(value: object) -> int:
    if not isinstance(value, Sized):
        return UNKNOWN_CARDINALITY
    try:
        return len(value)
    except TypeError:  # A torch loader of an IterableDataset has the method, but no length.
        return UNKNOWN_CARDINALITY


def _from_iterable(value: Iterable[Any]) -> Dataset:
    iterator = iter(value)
    if iterator is not value:
        kind = f"an iterable of type {type(value).__name__}"
        source = Foreign(kind, lambda: iter(value), length=_find_length(value), reuses_arrays=True)
    else:
        kind, start = "a generator or iterator", _Once(iterator).start
        source = Foreign(kind, start, repeatable=False, reuses_arrays=True)
    return Dataset(source)


class _Once:
    """An iterator that can be started one time."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._started = False

    def start(self) -> Iterator[Any]:
        if self._started:
            raise ValueError(
                "a generator or iterator cannot be iterated twice: what it yielded is gone. Pass a "
                "function that makes it, for example lambda: my_generator(), or a list."
            )
        self._started = True
        return self._iterator


def _from_grain(value: Iterable[Any]) -> Dataset:
    if isinstance(value, Iterator):
        kind, repeatable, start = "a Grain iterator", False, _Once(value).start
    else:
        kind, repeatable, start = f"a Grain {type(value).__name__}", True, lambda: iter(value)
    length = _find_length(value) if hasattr(value, "__getitem__") else UNKNOWN_CARDINALITY
    return Dataset(Foreign(kind, start, repeatable, _save_grain, _load_grain, length))


def _save_grain(iterator: _GrainIterator) -> dict[str, str]:
    state = iterator.get_state()
    # A data loader's state is JSON in bytes already.
    return {"bytes": state.decode()} if isinstance(state, bytes) else {"dict": json.dumps(state)}


def _load_grain(iterator: _GrainIterator, saved: dict[str, str]) -> _GrainIterator:
    state = saved["bytes"].encode() if "bytes" in saved else json.loads(saved["dict"])
    iterator.set_state(state)
    return iterator


def _from_tensorflow(value: Any) -> Dataset:
    length = int(value.cardinality())

    def find_spec(leaf: Any) -> TensorSpec | None:
        shape = None if leaf.shape.rank is None else leaf.shape.as_list()
        return None if shape is None else TensorSpec(shape, leaf.dtype.as_numpy_dtype)

    try:
        signature = elements.map_leaves(find_spec, value.element_spec)
    except AttributeError:
        # Ragged and sparse components have no shape of this kind.
        signature = None
    if signature is not None and None in elements.list_leaves(signature):
        signature = None
    kind, start = "a tf.data data set", value.as_numpy_iterator
    return Dataset(Foreign(kind, start, length=length, signature=signature))

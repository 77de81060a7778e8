"""Data sets of anything that can be iterated: arrays, generators, loaders, other libraries'."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distribax.data import elements as nests
from distribax.data.dataset import Dataset
from distribax.data.element_spec import TensorSpec
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY
from distribax.data.plan.sources import Batches, Foreign


def as_dataset(value: Any) -> Dataset:
    """Makes a data set of anything iterable.

    - a `Dataset` is returned as it is;
    - arrays, and tuples and dicts of arrays, give their rows: batch them;
    - everything else gives batches as they come: a list of batches, a function that makes a
      generator, a generator or iterator (once only), Grain data sets and loaders, torch
      DataLoaders, tf.data data sets, any other iterable.

    Grain's iterators can be saved and restored, and so can lists and generator functions; others
    cannot be. Nothing but a `Dataset` of files can be sharded by file.
    """
    if isinstance(value, Dataset):
        return value
    if isinstance(value, list):
        return _of_batches(value)
    if _is_nest_of_arrays(value):
        return Dataset.from_tensor_slices(value)
    if isinstance(value, dict):  # To iterate it would give its keys.
        raise TypeError(
            f"a data set cannot be made of the dict {value!r}: not all its values are arrays with "
            "rows. Expected a dict of arrays, or a list of such dicts, one for each batch."
        )
    family = {module.split(".")[0] for module in _modules(value)}
    if "grain" in family:
        return _of_grain(value)
    if "tensorflow" in family and hasattr(value, "as_numpy_iterator"):
        return _of_tensorflow(value)
    if "torch" in family and hasattr(value, "__iter__"):
        return _foreign("a torch DataLoader", lambda: iter(value), length=_length(value))
    if not hasattr(value, "__iter__") or isinstance(value, (str, bytes)):
        if callable(value):
            make: Callable[[], Any] = value
            return Dataset.from_generator(make)
        raise TypeError(
            f"a data set cannot be made of {value!r} of type {type(value).__name__}. Expected a "
            "dx.data.Dataset, arrays, or something that can be iterated."
        )
    return _of_iterable(value)


def _modules(value: Any) -> list[str]:
    return [kind.__module__ for kind in type(value).__mro__]


def _is_nest_of_arrays(value: Any) -> bool:
    if isinstance(value, (tuple, dict)):
        return all(
            _is_nest_of_arrays(leaf) or isinstance(leaf, list) for leaf in nests.leaves(value)
        )
    return hasattr(value, "__array__") and np.ndim(value) > 0


def _of_batches(batches: list[Any]) -> Dataset:
    if not batches:
        raise ValueError("the list of batches is empty. Expected at least one batch.")
    items = tuple(nests.from_return(batch) for batch in batches)
    for item in items:
        nests.num_rows(item)
    return Dataset(Batches(items))


def _foreign(kind: str, start: Callable[[], Iterator[Any]], **options: Any) -> Dataset:
    return Dataset(Foreign(kind, start, **options))


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return UNKNOWN_CARDINALITY


def _of_iterable(value: Any) -> Dataset:
    if iter(value) is not value:
        kind = f"an iterable of type {type(value).__name__}"
        return _foreign(kind, lambda: iter(value), length=_length(value), reuses_arrays=True)
    once = _Once(value)
    return _foreign("a generator or iterator", once.start, repeatable=False, reuses_arrays=True)


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


def _of_grain(value: Any) -> Dataset:
    if hasattr(value, "__next__"):
        kind, repeatable, start = "a Grain iterator", False, _Once(value).start
    else:
        kind, repeatable, start = f"a Grain {type(value).__name__}", True, lambda: iter(value)
    length = _length(value) if hasattr(value, "__getitem__") else UNKNOWN_CARDINALITY
    return _foreign(
        kind, start, repeatable=repeatable, length=length, save=_save_grain, load=_load_grain
    )


def _save_grain(iterator: Any) -> Any:
    state = iterator.get_state()
    # A data loader's state is JSON in bytes already.
    return {"bytes": state.decode()} if isinstance(state, bytes) else {"dict": json.dumps(state)}


def _load_grain(iterator: Any, saved: dict[str, str]) -> Any:
    state = saved["bytes"].encode() if "bytes" in saved else json.loads(saved["dict"])
    iterator.set_state(state)
    return iterator


def _of_tensorflow(value: Any) -> Dataset:
    length = int(value.cardinality())

    def spec_of(leaf: Any) -> Any:
        shape = None if leaf.shape.rank is None else leaf.shape.as_list()
        return None if shape is None else TensorSpec(shape, leaf.dtype.as_numpy_dtype)

    try:
        signature = nests.map_leaves(spec_of, value.element_spec)
    except AttributeError:
        # Ragged and sparse components have no shape of this kind.
        signature = None
    if signature is not None and None in nests.leaves(signature):
        signature = None
    kind = "a tf.data data set"
    return _foreign(kind, value.as_numpy_iterator, length=length, signature=signature)

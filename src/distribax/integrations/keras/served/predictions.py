"""Predictions that workers compute while the loop goes on with the next batch."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from distribax.coordinator import RemoteValue


class Predictions:
    """The predictions of a model that have been scheduled and not yet fetched.

    Args:
        fetch: Waits for a result, and returns it.
        num_ahead: How many may be under way; the oldest is fetched before there are more.
    """

    def __init__(self, fetch: Callable[[RemoteValue], Any], num_ahead: int) -> None:
        self._fetch = fetch
        self._num_ahead = num_ahead
        self._pending: deque[Callable[[], list[Any]]] = deque()
        # What a model makes of a batch, by the form of the batch.
        self._forms: dict[object, Any] = {}

    def add(self, result: RemoteValue, batch: Any) -> Any:
        """Returns a future result as arrays that are fetched when they are used.

        Args:
            result: The result.
            batch: What it is computed from.
        """
        leaves, tree = jax.tree.flatten(batch)
        form = tree, tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
        if form not in self._forms:
            # Which arrays it consists of is known when it has come.
            first = self._fetch(result)
            self._forms[form] = jax.tree.structure(first)
            return first
        get_arrays = functools.cache(lambda: jax.tree.leaves(self._fetch(result)))
        self._pending.append(get_arrays)
        if len(self._pending) > self._num_ahead:
            self._pending.popleft()()
        made = self._forms[form]
        arrays = [PendingArray(get_arrays, number) for number in range(made.num_leaves)]
        return jax.tree.unflatten(made, arrays)


class PendingArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that a worker computes, which is fetched when it is used.

    Args:
        get_arrays: Returns the arrays of the result that it is a part of.
        number: Which of them it is.
    """

    def __init__(self, get_arrays: Callable[[], list[Any]], number: int) -> None:
        self._get_arrays = get_arrays
        self._number = number

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._get_arrays()[self._number], dtype=dtype, copy=copy)

    @override
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        own = [np.asarray(each) if isinstance(each, PendingArray) else each for each in inputs]
        return getattr(ufunc, method)(*own, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __len__(self) -> int:
        return len(np.asarray(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

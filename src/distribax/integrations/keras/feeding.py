"""Global batches of Keras's data adapters, as the replicas take them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import jax
import numpy as np

from distribax import contracts
from distribax.data.distributed.feed import Feeder
from distribax.data.distributed.step_batches import StepBatches
from distribax.values import is_wrapped


class BatchFeeder:
    """Divides batches among the replicas, in order: the last pieces may be smaller or empty."""

    def __init__(self, strategy: contracts.Strategy) -> None:
        self._target = strategy.extended.input_target()
        self._first = strategy.extended.first_replica
        self._feed = Feeder(self._target, to_device=True)

    def __call__(self, batch: Any) -> Any:
        """Returns a batch with a piece for each replica; with one replica, the batch itself."""
        num_replicas = self._target.num_replicas_in_sync
        leaves, tree = jax.tree.flatten(batch, is_leaf=is_wrapped)
        if num_replicas == 1 or any(map(is_wrapped, leaves)):
            return batch
        arrays = [_as_array(leaf) for leaf in leaves]
        num_rows = _count_rows(arrays)
        size = -(-num_rows // num_replicas)
        pieces = [
            jax.tree.unflatten(tree, _take_rows(arrays, start, size))
            for start in self._list_starts(size)
        ]
        if num_rows % num_replicas == 0:
            own = _take_rows(arrays, self._first * size, size * len(pieces))
            return self._feed(StepBatches(pieces, True, jax.tree.unflatten(tree, own)))
        shapes = [_find_shapes(arrays, index * size, size) for index in range(num_replicas)]
        return self._feed(StepBatches(pieces, False, shapes=shapes))

    def _list_starts(self, size: int) -> list[int]:
        """Returns the first rows of this process's pieces."""
        first = self._first
        return [index * size for index in range(first, first + self._target.num_local_replicas)]

    def stack(self, batches: list[Any]) -> Any | None:
        """Returns several batches as one, of which each replica has a piece of each.

        None if they have different sizes, or cannot be divided evenly.
        """
        num_replicas = self._target.num_replicas_in_sync
        flat = [jax.tree.flatten(batch, is_leaf=is_wrapped) for batch in batches]
        lists = [leaves for leaves, _ in flat]
        if any(map(is_wrapped, chain(*lists))):
            return None
        columns = [[_as_array(leaf) for leaf in column] for column in zip(*lists, strict=True)]
        rows = {_count_rows([column[index] for column in columns]) for index in range(len(batches))}
        size, rest = divmod(max(rows), num_replicas)
        if len(rows) > 1 or rest:
            return None
        tree = flat[0][1]
        pieces = [
            jax.tree.unflatten(
                tree, [np.stack([a[start : start + size] for a in c]) for c in columns]
            )
            for start in self._list_starts(size)
        ]
        return pieces[0] if num_replicas == 1 else self._feed(StepBatches(pieces, True))


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (np.ndarray, jax.Array)) else np.asarray(leaf)


def _count_rows(arrays: list[Any]) -> int:
    shapes = [array.shape for array in arrays]
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"fit: a batch has arrays of the shapes {shapes}, which cannot be divided among "
            "replicas. Expected a first dimension of the same size in all of them, with an entry "
            "for each example."
        )
    return int(shapes[0][0])


def _take_rows(arrays: list[Any], start: int, size: int) -> list[Any]:
    return [array[start : start + size] for array in arrays]


def _find_shapes(arrays: list[Any], start: int, size: int) -> list[tuple[int, ...]]:
    rows = [max(0, min(size, array.shape[0] - start)) for array in arrays]
    return [(count, *array.shape[1:]) for count, array in zip(rows, arrays, strict=True)]


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Returns up to `count` elements, and raises StopIteration if there is none."""
    return [next(iterator), *islice(iterator, count - 1)]


def join_outputs(parts: list[Any]) -> Any:
    """Returns the outputs of several steps as those of one."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: np.concatenate([*map(np.asarray, arrays)]), *parts)

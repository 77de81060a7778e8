"""Steps that choose and order elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distribax.data import arguments as check
from distribax.data.dataset_options import SHARD_HINT
from distribax.data.plan import order, selection
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY
from distribax.data.planned_dataset import D, PlannedDataset


def shard(self: D, num_shards: int, index: int, name: str | None = None) -> D:
    """Keeps every `num_shards`-th element, from number `index` on.

    Args:
        num_shards: How many shards there are. `shard(SHARD_HINT, SHARD_HINT)` leaves both
            numbers to AutoShardPolicy.HINT.
        index: Which of them to keep.
        name: Accepted, without effect.

    Returns:
        The shard.

    Raises:
        ValueError: `num_shards` is less than 1, or there is no shard `index`.
    """
    count = check.whole_number(num_shards, "num_shards")
    number = check.whole_number(index, "index")
    if count != SHARD_HINT:
        check.positive(count, "num_shards")
        if not 0 <= number < count:
            raise ValueError(f"index={number} is outside 0 to {count - 1} (num_shards - 1).")
    return self.derive(order.Shard(self.plan, count, number))


def repeat(self: D, count: int | None = None, name: str | None = None) -> D:
    """Repeats the data set.

    Args:
        count: How many times it is iterated in all; None or -1 for endlessly.
        name: Accepted, without effect.

    Returns:
        The repeated data set.
    """
    number = None if count is None else check.whole_number(count, "count")
    forever = number is None or number < 0
    return self.derive(order.Repeat(self.plan, None if forever else number))


def shuffle(
    self: D,
    buffer_size: int,
    seed: int | None = None,
    reshuffle_each_iteration: bool | None = True,
    name: str | None = None,
) -> D:
    """Gives elements in a random order, drawn from a buffer.

    Args:
        buffer_size: How many elements the buffer holds. One as large as the data set (or
            UNKNOWN_CARDINALITY) shuffles it perfectly.
        seed: Makes the order the same in every process.
        reshuffle_each_iteration: Whether every iteration and repetition has another order.
        name: Accepted, without effect.

    Returns:
        The shuffled data set.

    Raises:
        ValueError: `buffer_size` is less than 1.
    """
    size: int | None = check.whole_number(buffer_size, "buffer_size")
    if size == UNKNOWN_CARDINALITY:
        size = None
    elif size is not None and size < 1:
        raise ValueError(
            f"buffer_size={size} is too small. Expected at least 1, or UNKNOWN_CARDINALITY for "
            "a buffer of all elements."
        )
    number = None if seed is None else check.whole_number(seed, "seed")
    again = reshuffle_each_iteration
    again = again is None or check.flag(again, "reshuffle_each_iteration")
    return self.derive(order.Shuffle(self.plan, size, number, again))


def take(self: D, count: int, name: str | None = None) -> D:
    """Keeps the first elements.

    Args:
        count: How many; -1 for all.
        name: Accepted, without effect.

    Returns:
        The shorter data set.
    """
    number = check.whole_number(count, "count")
    return self if number < 0 else self.derive(order.Take(self.plan, number))


def skip(self: D, count: int, name: str | None = None) -> D:
    """Leaves out the first elements.

    Args:
        count: How many; -1 for all.
        name: Accepted, without effect.

    Returns:
        The shorter data set.
    """
    number = check.whole_number(count, "count")
    if number < 0:
        return self.derive(order.Take(self.plan, 0))
    return self.derive(order.Skip(self.plan, number))


def concatenate(self: D, dataset: PlannedDataset, name: str | None = None) -> D:
    """Gives the elements of another data set after those of this one.

    Args:
        dataset: The other one, with elements of the same structure.
        name: Accepted, without effect.

    Returns:
        The longer data set.

    Raises:
        TypeError: `dataset` is not a `Dataset`.
    """
    if not isinstance(dataset, PlannedDataset):
        raise TypeError(
            f"dataset={dataset!r} of type {type(dataset).__name__} is not a Dataset. Make one "
            "of it first, for example with Dataset.from_tensor_slices."
        )
    return self.derive(order.Concatenate((self.plan, dataset.plan)))


def take_while(self: D, predicate: Callable[..., Any], name: str | None = None) -> D:
    """Keeps the elements before the first one for which a function returns False.

    Args:
        predicate: The function. A tuple is passed as several arguments.
        name: Accepted, without effect.

    Returns:
        The shorter data set.
    """
    return self.derive(selection.TakeWhile(self.plan, check.function(predicate, "predicate")))


def unique(self: D, name: str | None = None) -> D:
    """Leaves out elements that came before; elements are numbers or text.

    A restored iterator reads again from the first element on.

    Args:
        name: Accepted, without effect.

    Returns:
        The data set of different elements, in the order of their first appearance.
    """
    return self.derive(selection.Unique(self.plan))


def rejection_resample(
    self: D,
    class_func: Callable[..., Any],
    target_dist: Sequence[float],
    initial_dist: Sequence[float] | None = None,
    seed: int | None = None,
    name: str | None = None,
) -> D:
    """Leaves out elements at random, so that classes have the shares that were asked for.

    A restored iterator reads again from the first element on.

    Args:
        class_func: Returns the class of an element, a number from 0 up. A tuple is passed as
            several arguments.
        target_dist: The share of each class that is wanted.
        initial_dist: The share of each class in the data; None to estimate it while reading.
        seed: Makes the choice the same in every process.
        name: Accepted, without effect.

    Returns:
        The data set of pairs: the class and the element.

    Raises:
        ValueError: The shares are negative, all zero, or differ in number.
    """
    target = _parse_shares(target_dist, "target_dist")
    initial = None if initial_dist is None else _parse_shares(initial_dist, "initial_dist")
    if initial is not None and len(initial) != len(target):
        raise ValueError(
            f"initial_dist has {len(initial)} classes, target_dist has {len(target)}. They must "
            "have a share for each class."
        )
    function = check.function(class_func, "class_func")
    number = None if seed is None else check.whole_number(seed, "seed")
    return self.derive(selection.Resample(self.plan, function, target, initial, number))


def _parse_shares(given: Sequence[float], name: str) -> tuple[float, ...]:
    shares = np.asarray(given, np.float64)
    if shares.ndim != 1 or not shares.size or (shares < 0).any() or not shares.sum() > 0:
        raise ValueError(
            f"{name}={given!r} is not a distribution. Expected a share of at least 0 for each "
            "class, one of them more."
        )
    return tuple((shares / shares.sum()).tolist())

"""Steps that put elements together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distribax.data import arguments as check
from distribax.data import elements
from distribax.data.plan import grouping, transforms
from distribax.data.plan.buckets import Buckets
from distribax.data.plan.padding import parse_padded_shapes
from distribax.data.plan.plan_node import HasPlan
from distribax.data.planned_dataset import D


def batch(
    self: D,
    batch_size: int,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    name: str | None = None,
) -> D:
    """Stacks consecutive elements into batches.

    Args:
        batch_size: How many elements make a batch.
        drop_remainder: Whether a smaller last batch is left out.
        num_parallel_calls: Accepted; batches are made in the thread that reads them.
        deterministic: Accepted; the order of the elements is always kept.
        name: Accepted, without effect.

    Returns:
        The data set of batches.
    """
    size = check.positive(batch_size, "batch_size")
    return self.derive(
        transforms.Batching(self.plan, size, check.flag(drop_remainder, "drop_remainder"))
    )


def padded_batch(
    self: D,
    batch_size: int,
    padded_shapes: object = None,
    padding_values: object = None,
    drop_remainder: bool = False,
    name: str | None = None,
) -> D:
    """Stacks elements of different shapes, padded to one shape.

    Args:
        batch_size: How many elements make a batch.
        padded_shapes: The shape of each component, in the structure of the elements; None, for
            all or for one dimension, takes the largest size in the batch.
        padding_values: What to pad with, one value or one for each component; None for zeros
            and empty text.
        drop_remainder: Whether a smaller last batch is left out.
        name: Accepted, without effect.

    Returns:
        The data set of batches.

    >>> import distribax as dx
    >>> ragged = dx.data.Dataset.range(1, 4).map(lambda n: np.full(n, n))
    >>> [batch.tolist() for batch in ragged.padded_batch(3)]
    [[[1, 0, 0], [2, 2, 0], [3, 3, 3]]]
    """
    size = check.positive(batch_size, "batch_size")
    shapes = None if padded_shapes is None else parse_padded_shapes(padded_shapes)
    node = transforms.PaddedBatching(
        self.plan, size, check.flag(drop_remainder, "drop_remainder"), shapes, padding_values
    )
    return self.derive(node)


def ragged_batch(
    self: D,
    batch_size: int,
    drop_remainder: bool = False,
    row_splits_dtype: check.DTypeLike = np.int64,
    name: str | None = None,
) -> D:
    """Stacks elements of different shapes, padded with zeros: there are no ragged arrays here.

    Args:
        batch_size: How many elements make a batch.
        drop_remainder: Whether a smaller last batch is left out.
        row_splits_dtype: Accepted; a padded batch has no row splits.
        name: Accepted, without effect.

    Returns:
        The data set of batches, as `padded_batch` makes them.
    """
    check.dtype(row_splits_dtype, "row_splits_dtype")
    return padded_batch(self, batch_size, drop_remainder=drop_remainder)


def unbatch(self: D, name: str | None = None) -> D:
    """Gives the rows of batches, one by one.

    Args:
        name: Accepted, without effect.

    Returns:
        The data set of the rows.
    """
    return self.derive(transforms.Unbatch(self.plan))


def rebatch(
    self: D, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None
) -> D:
    """Makes batches of another size of batches; rows keep their order.

    Args:
        batch_size: The new size, or several sizes that take turns.
        drop_remainder: Whether a smaller last batch is left out.
        name: Accepted, without effect.

    Returns:
        The data set of the new batches.

    Raises:
        ValueError: There is no size, or one is less than 1.

    >>> import distribax as dx
    >>> [batch.tolist() for batch in dx.data.Dataset.range(7).batch(4).rebatch([2, 1])]
    [[0, 1], [2], [3, 4], [5], [6]]
    """
    given = np.atleast_1d(np.asarray(batch_size)).tolist()
    sizes = tuple(check.positive(size, "batch_size") for size in given)
    if not sizes:
        raise ValueError("batch_size=[] has no size. Expected at least one.")
    return self.derive(
        grouping.Rebatch(self.plan, sizes, check.flag(drop_remainder, "drop_remainder"))
    )


def window(
    self: D,
    size: int,
    shift: int | None = None,
    stride: int = 1,
    drop_remainder: bool = False,
    name: str | None = None,
) -> D:
    """Groups consecutive elements into data sets; elements of nests become nests of data sets.

    Args:
        size: How many elements a window has.
        shift: How many elements the next window begins after this one; None for `size`.
        stride: How many elements apart those of a window are.
        drop_remainder: Whether smaller last windows are left out.
        name: Accepted, without effect.

    Returns:
        A data set of data sets.

    >>> import distribax as dx
    >>> windows = dx.data.Dataset.range(5).window(3, shift=1, drop_remainder=True)
    >>> [batch.tolist() for batch in windows.flat_map(lambda window: window.batch(3))]
    [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    """
    width = check.positive(size, "size")
    node = grouping.Window(
        self.plan,
        width,
        width if shift is None else check.positive(shift, "shift"),
        check.positive(stride, "stride"),
        check.flag(drop_remainder, "drop_remainder"),
        self.derive,
    )
    return self.derive(node)


def group_by_window(
    self: D,
    key_func: Callable[..., Any],
    reduce_func: Callable[[np.int64, D], HasPlan],
    window_size: int | None = None,
    window_size_func: Callable[[np.int64], Any] | None = None,
    name: str | None = None,
) -> D:
    """Collects elements by a key, and puts each full group through a function.

    At the end come the groups that are not full, in the order of their keys.

    Args:
        key_func: Returns the key of an element, a whole number. A tuple is passed as several
            arguments.
        reduce_func: Makes a data set of a key and the data set of its group.
        window_size: How many elements make a group.
        window_size_func: Returns that number for a key, instead.
        name: Accepted, without effect.

    Returns:
        The data set of the elements of what `reduce_func` returns.

    Raises:
        ValueError: Not exactly one of `window_size` and `window_size_func` is given.

    >>> import distribax as dx
    >>> pairs = dx.data.Dataset.range(5).group_by_window(
    ...     lambda x: x % 2, lambda key, group: group.batch(2), window_size=2
    ... )
    >>> [batch.tolist() for batch in pairs]
    [[0, 2], [1, 3], [4]]
    """
    if (window_size is None) == (window_size_func is None):
        raise ValueError(
            f"window_size={window_size!r} and window_size_func={window_size_func!r}: expected one "
            "of the two."
        )
    if window_size_func is None:
        size = check.positive(window_size, "window_size")
        size_of: Callable[[np.int64], Any] = lambda key: size  # noqa: E731
    else:
        size_of = check.function(window_size_func, "window_size_func")
    node = grouping.GroupByWindow(
        self.plan,
        check.function(key_func, "key_func"),
        check.function(reduce_func, "reduce_func"),
        size_of,
        self.derive,
    )
    return self.derive(node)


def bucket_by_sequence_length(
    self: D,
    element_length_func: Callable[..., Any],
    bucket_boundaries: Sequence[int],
    bucket_batch_sizes: Sequence[int],
    padded_shapes: object = None,
    padding_values: object = None,
    pad_to_bucket_boundary: bool = False,
    no_padding: bool = False,
    drop_remainder: bool = False,
    name: str | None = None,
) -> D:
    """Makes batches of elements of similar length, padded to one shape.

    Args:
        element_length_func: Returns the length of an element. A tuple is passed as several
            arguments.
        bucket_boundaries: The lengths at which the next bucket begins, in ascending order.
        bucket_batch_sizes: The batch size of each bucket: one more than there are boundaries.
        padded_shapes: As for `padded_batch`.
        padding_values: As for `padded_batch`.
        pad_to_bucket_boundary: Whether to pad to the longest length that the bucket can hold; then
            no element may be longer than the buckets.
        no_padding: Whether elements of a bucket have one shape already.
        drop_remainder: Whether smaller last batches are left out.
        name: Accepted, without effect.

    Returns:
        The data set of batches.

    Raises:
        ValueError: The numbers of boundaries and sizes do not fit each other.

    >>> import distribax as dx
    >>> ragged = dx.data.Dataset.range(1, 5).map(lambda n: np.full(n, n))
    >>> batches = ragged.bucket_by_sequence_length(len, [3], [2, 2])
    >>> [batch.tolist() for batch in batches]
    [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
    """
    buckets = Buckets(
        check.function(element_length_func, "element_length_func"),
        tuple(check.whole_number(each, "bucket_boundaries") for each in bucket_boundaries),
        tuple(check.positive(each, "bucket_batch_sizes") for each in bucket_batch_sizes),
        check.flag(pad_to_bucket_boundary, "pad_to_bucket_boundary"),
    )
    drop = check.flag(drop_remainder, "drop_remainder")
    pad = not check.flag(no_padding, "no_padding")
    shapes = padded_shapes
    if shapes is None and pad_to_bucket_boundary:
        shapes = elements.map_leaves(lambda leaf: list(leaf.shape), self.element_spec)

    def make_batch(key: np.int64, group: D) -> D:
        bucket = int(key)
        size = buckets.batch_sizes[bucket]
        if not pad:
            return batch(group, size, drop)
        dims = None if shapes is None else parse_padded_shapes(shapes)
        node = transforms.PaddedBatching(
            group.plan, size, drop, buckets.fill(dims, bucket), padding_values
        )
        return group.derive(node)

    node = grouping.GroupByWindow(
        self.plan,
        buckets.find,
        make_batch,
        lambda key: buckets.batch_sizes[int(key)],
        self.derive,
        buckets.numbers,
    )
    return self.derive(node)

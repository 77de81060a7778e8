"""Steps about how and when elements are made, and what ends a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from distribax.data import arguments as check
from distribax.data import elements
from distribax.data.dataset_options import Options
from distribax.data.formats.saved import SavedWriter
from distribax.data.plan import selection, transforms
from distribax.data.plan.plan_node import INFINITE_CARDINALITY, HasPlan
from distribax.data.planned_dataset import D

_T = TypeVar("_T")


def prefetch(self: D, buffer_size: int | None, name: str | None = None) -> D:
    """Makes elements ahead of use in a background thread.

    Args:
        buffer_size: How many elements; 0 for none, None or AUTOTUNE to let the library choose.
        name: Accepted, without effect.

    Returns:
        The data set, read ahead.
    """
    size = check.buffer_size(buffer_size, "buffer_size")
    return self.derive(transforms.Prefetch(self.plan, size))


def cache(self: D, filename: str = "", name: str | None = None) -> D:
    """Keeps the elements of the first complete iteration, for later ones to read.

    Args:
        filename: A file to keep them in; "" keeps them in memory. Later processes read the file
            too: delete it when the pipeline before it changes.
        name: Accepted, without effect.

    Returns:
        The cached data set.
    """
    return self.derive(transforms.Cache(self.plan, check.path(filename, "filename")))


def snapshot(
    self: D,
    path: check.Path,
    compression: str | None = "AUTO",
    reader_func: Callable[[D], HasPlan] | None = None,
    shard_func: Callable[..., Any] | None = None,
    name: str | None = None,
) -> D:
    """Writes the elements of the first complete iteration to a directory, for later ones to read.

    Later processes read it too: delete the directory when the steps before it change.

    Args:
        path: The directory.
        compression: "GZIP"; "AUTO" or None for no compression.
        reader_func: Makes a data set of the data set of saved files; None reads them in turns.
        shard_func: Returns the number of the file that an element is written to; None for one file.
        name: Accepted, without effect.

    Returns:
        The data set that is kept.
    """
    node = transforms.Snapshot(
        self.plan,
        check.path(path, "path"),
        None if compression == "AUTO" else compression,
        None if shard_func is None else check.function(shard_func, "shard_func"),
        None if reader_func is None else check.function(reader_func, "reader_func"),
        self.derive,
    )
    return self.derive(node)


def save(
    self: D,
    path: check.Path,
    compression: str | None = None,
    shard_func: Callable[..., Any] | None = None,
    name: str | None = None,
) -> None:
    """Writes all elements to a directory, from which `Dataset.load` reads them.

    Args:
        path: The directory; a data set that was saved there before is replaced.
        compression: "GZIP", or None.
        shard_func: Returns the number of the file that an element is written to; None for one file.
        name: Accepted, without effect.
    """
    writer = SavedWriter(check.path(path, "path"), compression, shard_func)
    try:
        for element in self:
            writer.add(element)
        writer.finish(self.element_spec, self.is_batched)
    finally:
        writer.discard()


def with_options(self: D, options: Options, name: str | None = None) -> D:
    """Attaches options; if an option was set before, the later setting counts.

    Args:
        options: The options.
        name: Accepted, without effect.

    Returns:
        The data set with them.

    Raises:
        TypeError: `options` is not `dx.data.Options`.
    """
    if not isinstance(options, Options):
        raise TypeError(
            f"options={options!r} of type {type(options).__name__} is not dx.data.Options."
        )
    return self.derive(transforms.WithOptions(self.plan, copy.deepcopy(options)))


def apply(self: D, transformation_func: Callable[[D], _T]) -> _T:
    """Returns what a function makes of this data set.

    Args:
        transformation_func: The function.

    Returns:
        Its result, usually another data set.
    """
    return check.function(transformation_func, "transformation_func")(self)


def assert_cardinality(self: D, expected_cardinality: int, name: str | None = None) -> D:
    """Says how many elements there are; an iteration that has another number raises ValueError.

    Args:
        expected_cardinality: The number, or INFINITE_CARDINALITY.
        name: Accepted, without effect.

    Returns:
        The data set, with that `cardinality()`.

    Raises:
        ValueError: The number is negative.
    """
    number = check.whole_number(expected_cardinality, "expected_cardinality")
    if number < INFINITE_CARDINALITY:
        raise ValueError(
            f"expected_cardinality={number} is negative. Expected a number of elements, or "
            "dx.data.INFINITE_CARDINALITY."
        )
    return self.derive(selection.AssertCardinality(self.plan, number))


def reduce(
    self: D,
    initial_state: object,
    reduce_func: Callable[[Any, Any], Any],
    name: str | None = None,
) -> Any:
    """Goes through the data set once, and returns what a function makes of its elements.

    Args:
        initial_state: The state of the first call: a nest of arrays or numbers.
        reduce_func: Called with a state and an element (a tuple is one argument); returns the next
            state.
        name: Accepted, without effect.

    Returns:
        The last state.

    Raises:
        TypeError: The function returned another structure than that of `initial_state`.

    >>> import distribax as dx, numpy as np
    >>> int(dx.data.Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x))
    10
    """
    function = check.function(reduce_func, "reduce_func")
    state = elements.to_element(initial_state)
    for element in self:
        state = elements.check_state(
            state, elements.from_return(function(state, element)), "reduce_func"
        )
    return state


def get_single_element(self: D, name: str | None = None) -> Any:
    """Returns the element of a data set that has exactly one.

    Args:
        name: Accepted, without effect.

    Returns:
        The element.

    Raises:
        ValueError: There is none, or more than one.
    """
    found = [element for _, element in zip(range(2), self, strict=False)]
    if len(found) != 1:
        number = "no element" if not found else "more than one element"
        raise ValueError(f"get_single_element: the data set has {number}. Expected exactly one.")
    return found[0]

"""Steps that change elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distribax.data import arguments as check
from distribax.data import elements
from distribax.data.dataset_options import AUTOTUNE
from distribax.data.plan import order, selection, transforms
from distribax.data.plan.plan_node import HasPlan
from distribax.data.planned_dataset import D

# tf.data takes the number of cores; a fixed number gives the same order on every machine.
_DEFAULT_CYCLE_LENGTH = 4


def map(
    self: D,
    map_func: Callable[..., Any],
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    name: str | None = None,
) -> D:
    """Puts every element through a function.

    Args:
        map_func: The function. A tuple is passed as several arguments.
        num_parallel_calls: How many threads run it ahead of use, which helps functions that
            release Python's lock (NumPy, decoders, files); None for no threads.
        deterministic: Accepted; the order of the elements is always kept.
        name: Accepted, without effect.

    Returns:
        The data set of what the function returns.
    """
    check.function(map_func, "map_func")
    threads = check.num_threads(num_parallel_calls, "num_parallel_calls")
    return self.derive(transforms.Map(self.plan, map_func, threads))


def filter(self: D, predicate: Callable[..., Any], name: str | None = None) -> D:
    """Keeps the elements for which a function returns True.

    Args:
        predicate: The function. A tuple is passed as several arguments.
        name: Accepted, without effect.

    Returns:
        The data set of the elements that are kept.
    """
    return self.derive(transforms.Filter(self.plan, check.function(predicate, "predicate")))


def flat_map(self: D, map_func: Callable[..., HasPlan], name: str | None = None) -> D:
    """Makes a data set of every element and gives their elements, one after the other.

    Args:
        map_func: Returns the data set of an element.
        name: Accepted, without effect.

    Returns:
        The data set of their elements.
    """
    function = check.function(map_func, "map_func")
    return self.derive(order.Interleave(self.plan, function, step="flat_map"))


def interleave(
    self: D,
    map_func: Callable[..., HasPlan],
    cycle_length: int | None = None,
    block_length: int | None = None,
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    name: str | None = None,
) -> D:
    """Makes a data set of every element and gives their elements in turns.

    Args:
        map_func: Returns the data set of an element.
        cycle_length: How many of them are open at a time; None for 4.
        block_length: How many elements come from each in turn; None for 1.
        num_parallel_calls: How many of them are read ahead of use, in threads.
        deterministic: Accepted; the order of the elements is always the same.
        name: Accepted, without effect.

    Returns:
        The data set of their elements.
    """
    cycle = _DEFAULT_CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
    node = order.Interleave(
        self.plan,
        check.function(map_func, "map_func"),
        check.positive(cycle, "cycle_length"),
        check.positive(1 if block_length is None else block_length, "block_length"),
        check.num_threads(num_parallel_calls, "num_parallel_calls"),
    )
    return self.derive(node)


def enumerate(self: D, start: int = 0, name: str | None = None) -> D:
    """Pairs every element with its number.

    Args:
        start: The number of the first element.
        name: Accepted, without effect.

    Returns:
        The data set of pairs.
    """
    return self.derive(transforms.Enumerate(self.plan, check.whole_number(start, "start")))


def scan(
    self: D, initial_state: object, scan_func: Callable[..., Any], name: str | None = None
) -> D:
    """Puts every element through a function that also passes a state on to the next call.

    A restored iterator runs the function again from the first element on.

    Args:
        initial_state: The state of the first call: a nest of arrays or numbers.
        scan_func: Called with a state and an element (a tuple is one argument); returns the next
            state and the new element.
        name: Accepted, without effect.

    Returns:
        The data set of the new elements.

    >>> import distribax as dx, numpy as np
    >>> sums = dx.data.Dataset.range(4).scan(np.int64(0), lambda total, x: (total + x, total + x))
    >>> [int(x) for x in sums]
    [0, 1, 3, 6]
    """
    function = check.function(scan_func, "scan_func")
    return self.derive(selection.Scan(self.plan, elements.to_element(initial_state), function))


def ignore_errors(self: D, log_warning: bool = False, name: str | None = None) -> D:
    """Leaves out the elements whose making raised an exception.

    After a damaged record, the rest of its file is left out. An exception that comes again although
    nothing was read in between is raised.

    Args:
        log_warning: Whether each exception is logged.
        name: Accepted, without effect.

    Returns:
        The data set of the other elements.
    """
    return self.derive(selection.IgnoreErrors(self.plan, check.flag(log_warning, "log_warning")))

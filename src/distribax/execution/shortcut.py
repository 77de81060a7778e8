"""A short way to the program of a call whose arguments are all iterators, as a training step's are.

What such a call is compiled for depends on the elements alone. So it is enough to see that they
look like those of the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distribax.execution.iterators import LiftedIterator
from distribax.types import Args

Pulled = list[tuple[Any, Any]]
"""Iterators, and the elements that were fetched from them."""


class Shortcut:
    """A program, and the elements that it is for: nests of NumPy arrays of these forms.

    Args:
        call: The program; given its inputs.
        sources: Which argument each element is fetched from.
        elements: Elements that it was called with.
    """

    def __init__(
        self, call: Callable[[list[Any]], Any], sources: Sequence[int], elements: Sequence[Any]
    ) -> None:
        self.call = call
        self._sources = sources
        leaves, tree = jax.tree.flatten(elements)
        self._tree: Any = tree
        self._forms = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def pull(self, args: Args) -> Pulled:
        """Fetches the elements for a call."""
        return [(args[source], args[source].fetch()) for source in self._sources]

    def inputs(self, pulled: Pulled) -> list[Any] | None:
        """Returns the inputs of the program; None if it is not for these elements."""
        leaves, tree = jax.tree.flatten([element for _, element in pulled])
        if tree != self._tree:
            return None
        for leaf, (shape, dtype) in zip(leaves, self._forms, strict=True):
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return None
        return leaves


def leads(args: Args, pulled: Pulled) -> bool:
    """Tells whether there can be a shortcut for a call with these arguments and elements."""
    if not are_iterators(args):  # Most functions, at each call: not a step more than this for them.
        return False
    given = [id(arg) for arg in args]
    leaves = jax.tree.leaves([element for _, element in pulled])
    return all(id(iterator) in given for iterator, _ in pulled) and all(
        type(leaf) is np.ndarray and leaf.dtype != object for leaf in leaves
    )


def are_iterators(args: Args) -> bool:
    """Tells whether all arguments are iterators, and there are some."""
    return bool(args) and all(isinstance(arg, LiftedIterator) for arg in args)

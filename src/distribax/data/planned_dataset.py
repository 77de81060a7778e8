"""A plan that can be looked at and iterated."""

from __future__ import annotations

import functools
from typing import Any, Self, TypeVar

from typing_extensions import override

from distribax.data.dataset_options import Options
from distribax.data.elements import DatasetLeaf
from distribax.data.iterator import DatasetIterator
from distribax.data.plan import transforms
from distribax.data.plan.plan_node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node
from distribax.data.runtime import runner
from distribax.execution import require_host


class PlannedDataset(DatasetLeaf):
    """The part of a data set that does not depend on how its plan was written.

    Args:
        plan: The logical plan.
    """

    def __init__(self, plan: Node) -> None:
        self._plan = plan

    @property
    def plan(self) -> Node:
        """The logical plan, for rewrites and inspection."""
        return self._plan

    def derive(self, plan: Node) -> Self:
        """Returns a data set of another plan.

        Args:
            plan: The plan.

        Returns:
            The data set.
        """
        return type(self)(plan)

    def options(self) -> Options:
        """Returns the options that were attached along the pipeline."""
        return transforms.merge_options(self._plan)

    def cardinality(self) -> int:
        """Returns the number of elements, or INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._plan.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("the data set is infinite, it has no length.")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("the length of the data set is unknown before it was iterated.")
        return count

    def __bool__(self) -> bool:
        # Without this, `if dataset` would ask for a length that may be unknown.
        return True

    @functools.cached_property
    def element_spec(self) -> Any:
        """The nest of TensorSpecs of an element; a user's function is run once to find it."""
        return self._plan.spec(runner.read_first_element)

    @property
    def is_batched(self) -> bool | None:
        """Whether elements are batches; None if only the elements can tell (a generator)."""
        return self._plan.is_batched(runner.read_first_element)

    @property
    def static_batch_size(self) -> int | None:
        """The size of a full batch, if the pipeline fixes it."""
        return self._plan.static_batch_size(runner.read_first_element)

    def make_iterator(self) -> DatasetIterator:
        """Returns a new iterator; it can be saved, restored and closed."""
        return DatasetIterator(self._plan)

    def __iter__(self) -> DatasetIterator:
        require_host("a loop over a data set")
        return self.make_iterator()

    def as_numpy_iterator(self) -> DatasetIterator:
        """Returns a new iterator; elements are NumPy values in any case."""
        return iter(self)

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._plan.label or type(self._plan).__name__.lower()}>"


D = TypeVar("D", bound=PlannedDataset)
"""The class of a data set that a step is put on."""

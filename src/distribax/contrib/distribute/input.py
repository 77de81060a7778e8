"""Input for towers: a data set of which each tower takes the next element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from distribax.data.distributed import DistributedDataset, DistributedIterator
from distribax.execution import LiftedIterator, require_host


class PerDeviceDataset:
    """A data set whose elements have a value for each tower.

    Made by `DistributionStrategy.distribute_dataset`.

    Args:
        dataset: The data set that it shows to towers.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements, for each tower."""
        return self._dataset.element_spec

    def make_one_shot_iterator(self) -> DistributedIterator:
        """Returns an iterator that goes over the data set once."""
        return iter(self._dataset)

    def make_initializable_iterator(self) -> InitializableIterator:
        """Returns an iterator that must be initialized first, and starts again each time it is."""
        return InitializableIterator(self._dataset)

    def __iter__(self) -> DistributedIterator:
        return iter(self._dataset)


class InitializableIterator(LiftedIterator):
    """Iterates over a data set for towers, from the start at each `initialize()`.

    Args:
        dataset: The data set.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None

    def initialize(self) -> None:
        """Goes to the start of the data set."""
        require_host("iterator.initialize()")
        self.close()
        self._iterator = iter(self._dataset)

    @property
    def initializer(self) -> Callable[[], None]:
        """What `session.run` took: call it to go to the start of the data set."""
        return self.initialize

    @override
    def fetch(self) -> Any:
        """Returns the next element, outside of any trace."""
        return self._get_iterator().fetch()

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last element that was given out."""
        return self._get_iterator().get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned.

        Args:
            state: The position.
        """
        if self._iterator is None:
            self.initialize()
        self._get_iterator().set_state(state)

    def close(self) -> None:
        """Ends the iterator and its threads, until it is initialized again."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def _get_iterator(self) -> DistributedIterator:
        if self._iterator is None:
            raise RuntimeError(
                "get_next: the iterator has not been initialized, or was closed. Call "
                "iterator.initialize() first, as session.run(iterator.initializer) did."
            )
        return self._iterator

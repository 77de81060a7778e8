"""Values, data sets and iterators of which each worker has its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distribax.coordinator.pickling import described, dumps, pickle_callable, reason
from distribax.coordinator.references import Definition, Kind, Reference


class PerWorkerValues(Reference):
    """Holds one value for each worker; a scheduled function gets that of the worker it runs on.

    Example:
        >>> shards = PerWorkerValues(["part-0", "part-1"])
        >>> shards
        PerWorkerValues(['part-0', 'part-1'])
    """

    __slots__ = ("__weakref__", "_definition", "_values")

    def __init__(self, values: Sequence[Any]) -> None:
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise ValueError(
                f"PerWorkerValues: values={values!r} is not a list with one value for each worker."
            )
        self._values = tuple(values)
        self._definition: Definition | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, in the order of the workers."""
        return self._values

    @property
    def definition(self) -> Definition:
        if self._definition is None:
            pickled = [dumps(value) for value in self._values]
            parts = [data for data, _ in pickled]
            needs = tuple(need for _, needs in pickled for need in needs)
            self._definition = Definition(
                Kind.OBJECT, "a per-worker value", lambda index: parts[index], needs
            )
        return self._definition

    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self._values)!r})"


class PerWorkerDataset(Reference):
    """A data set of which each worker makes its own; `iter` gives an iterator for functions.

    `coordinator.create_per_worker_dataset` returns it.
    """

    __slots__ = ("__weakref__", "_definition", "_element_spec")

    def __init__(self, dataset: Any, element_spec: Callable[[PerWorkerDataset], Any]) -> None:
        self._element_spec = element_spec
        # A class has what its instances have, but is called for one; a text is a mistake.
        if hasattr(type(dataset), "__iter__") and not isinstance(dataset, (str, bytes)):
            kind, name = Kind.DATASET, "a data set"
            data, needs = _pickled(dataset)
        elif callable(dataset):
            kind, name = Kind.DATASET_FUNCTION, f"the data set of {described(dataset)}"
            data, needs = pickle_callable(dataset, "create_per_worker_dataset", "dataset_fn")
        else:
            raise TypeError(
                f"create_per_worker_dataset: dataset_fn={dataset!r} is neither a data set nor a "
                "function that returns one."
            )
        self._definition = Definition(kind, name, lambda _: data, needs)

    @property
    def definition(self) -> Definition:
        return self._definition

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements; a worker is asked."""
        return self._element_spec(self)

    def __iter__(self) -> PerWorkerIterator:
        """Returns a new iterator, which begins at the start on every worker."""
        return PerWorkerIterator(self)


class PerWorkerIterator(Reference):
    """An iterator of which each worker has its own; pass it to a scheduled function.

    Each worker makes it when a function first needs it, and again after it was restarted: then it
    begins at the start. When a worker's data is at its end, `next` in the function raises
    `dx.OutOfRangeError`, a `StopIteration`.
    """

    __slots__ = ("__weakref__", "_dataset", "_definition")

    def __init__(self, dataset: PerWorkerDataset) -> None:
        data, needs = dumps(dataset)
        self._dataset = dataset
        name = f"an iterator of {dataset.definition.name}"
        self._definition = Definition(Kind.ITERATOR, name, lambda _: data, needs)

    @property
    def definition(self) -> Definition:
        return self._definition

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements; a worker is asked."""
        return self._dataset.element_spec

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise TypeError(
            "next(iterator): a per-worker iterator has its elements on the workers. Pass it to a "
            "function, coordinator.schedule(step, args=(iterator,)), and call next() there."
        )

    def get_next(self) -> Any:
        """An error: elements are on the workers."""
        return next(self)


def _pickled(dataset: Any) -> tuple[bytes, tuple[Reference, ...]]:
    try:
        return dumps(dataset)
    except Exception as error:
        raise TypeError(
            f"create_per_worker_dataset: dataset_fn={dataset!r} cannot be sent to a worker: "
            f"{reason(error)}. Pass a function that makes the data set on the worker."
        ) from error

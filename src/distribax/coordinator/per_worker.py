"""Values, data sets and iterators that are different on each worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from distribax.coordinator.pickling import describe, dump_callable, dump_value, quote
from distribax.coordinator.references import Definition, DefinitionKind, WorkerReference


class PerWorkerValues(WorkerReference):
    """Holds one value for each worker; a scheduled function gets that of the worker it runs on.

    Args:
        values: The values, in the order of the workers.

    Raises:
        ValueError: If `values` is empty or not a list or tuple.

    Example:
        >>> shards = PerWorkerValues(["part-0", "part-1"])
        >>> shards
        PerWorkerValues(['part-0', 'part-1'])
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[object]) -> None:
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise ValueError(
                f"PerWorkerValues: values={values!r} is not a list with one value for each worker."
            )
        super().__init__()
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, in the order of the workers."""
        return self._values

    @override
    def _define(self) -> Definition:
        pickled = [dump_value(value) for value in self._values]
        parts = [data for data, _ in pickled]
        needs = tuple(need for _, needs in pickled for need in needs)
        return Definition(
            DefinitionKind.OBJECT, "a per-worker value", lambda index: parts[index], needs
        )

    @override
    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self._values)!r})"


class PerWorkerDataset(WorkerReference):
    """A data set that each worker makes for itself; `iter` gives an iterator for functions.

    `coordinator.create_per_worker_dataset` returns it.

    Args:
        dataset: A data set, or a function without arguments that returns one.
        find_element_spec: Asks a worker for the specs of the elements.

    Raises:
        TypeError: If `dataset` is neither, or cannot be sent to a worker.
    """

    __slots__ = ("_find_element_spec",)

    def __init__(
        self, dataset: object, find_element_spec: Callable[[PerWorkerDataset], Any]
    ) -> None:
        self._find_element_spec = find_element_spec
        # A string can be iterated too, but is a mistake.
        if hasattr(type(dataset), "__iter__") and not isinstance(dataset, (str, bytes)):
            kind, name = DefinitionKind.DATASET, "a data set"
            data, needs = _dump_dataset(dataset)
        elif callable(dataset):
            kind, name = DefinitionKind.DATASET_FUNCTION, f"the data set of {describe(dataset)}"
            data, needs = dump_callable(dataset, "create_per_worker_dataset", "dataset_fn")
        else:
            raise TypeError(
                f"create_per_worker_dataset: dataset_fn={dataset!r} is neither a data set nor a "
                "function that returns one."
            )
        super().__init__(Definition(kind, name, lambda _: data, needs))

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements; a worker is asked."""
        return self._find_element_spec(self)

    def __iter__(self) -> PerWorkerIterator:
        """Returns a new iterator, which begins at the start on every worker.

        Returns:
            An argument for scheduled functions.
        """
        return PerWorkerIterator(self)


class PerWorkerIterator(WorkerReference):
    """An iterator that is different on each worker; pass it to a scheduled function.

    Each worker makes it when a function first needs it, and again after a restart; then it begins
    at the start. When a worker's data ends, `next` in the function raises `dx.OutOfRangeError`, a
    `StopIteration`.

    Args:
        dataset: The data set.
    """

    __slots__ = ("_dataset",)

    def __init__(self, dataset: PerWorkerDataset) -> None:
        data, needs = dump_value(dataset)
        self._dataset = dataset
        name = f"an iterator of {dataset.definition.name}"
        super().__init__(Definition(DefinitionKind.ITERATOR, name, lambda _: data, needs))

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements; a worker is asked."""
        return self._dataset.element_spec

    def __iter__(self) -> PerWorkerIterator:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Raises an error: the elements are on the workers.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "next(iterator): a per-worker iterator has its elements on the workers. Pass it to a "
            "function, coordinator.schedule(step, args=(iterator,)), and call next() there."
        )

    def get_next(self) -> Any:
        """Raises an error: the elements are on the workers.

        Raises:
            TypeError: Always.
        """
        return next(self)


def _dump_dataset(dataset: object) -> tuple[bytes, tuple[WorkerReference, ...]]:
    try:
        return dump_value(dataset)
    except Exception as error:
        raise TypeError(
            f"create_per_worker_dataset: dataset_fn={dataset!r} cannot be sent to a worker: "
            f"{quote(error)}. Pass a function that makes the data set on the worker."
        ) from error

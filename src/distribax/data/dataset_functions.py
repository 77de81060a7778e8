"""Steps as functions for `Dataset.apply`, as tf.data.experimental has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from distribax.data import arguments as check
from distribax.data.dataset import Dataset
from distribax.data.iterator import DatasetIterator
from distribax.execution import LiftedIterator, Optional

DatasetFunction: TypeAlias = Callable[[Dataset], Dataset]
"""What `dataset.apply` takes."""


def _make_function(method: Callable[..., Dataset]) -> Callable[..., DatasetFunction]:
    def make(*args: Any, **kwargs: Any) -> DatasetFunction:
        return lambda dataset: method(dataset, *args, **kwargs)

    make.__name__ = make.__qualname__ = method.__name__
    make.__doc__ = (
        f"Returns a function for `dataset.apply`: what `Dataset.{method.__name__}` does.\n\n"
        "    Args:\n        *args: As for the method.\n        **kwargs: As for the method.\n\n"
        "    Returns:\n        The function.\n    "
    )
    return make


assert_cardinality = _make_function(Dataset.assert_cardinality)
bucket_by_sequence_length = _make_function(Dataset.bucket_by_sequence_length)
dense_to_ragged_batch = _make_function(Dataset.ragged_batch)
enumerate_dataset = _make_function(Dataset.enumerate)
group_by_window = _make_function(Dataset.group_by_window)
ignore_errors = _make_function(Dataset.ignore_errors)
rejection_resample = _make_function(Dataset.rejection_resample)
scan = _make_function(Dataset.scan)
snapshot = _make_function(Dataset.snapshot)
take_while = _make_function(Dataset.take_while)
unbatch = _make_function(Dataset.unbatch)
unique = _make_function(Dataset.unique)


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> DatasetFunction:
    """Returns a function for `dataset.apply` that shuffles and then repeats.

    Args:
        buffer_size: As for `Dataset.shuffle`.
        count: As for `Dataset.repeat`.
        seed: As for `Dataset.shuffle`.

    Returns:
        The function.
    """
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def cardinality(dataset: Dataset) -> int:
    """Returns the number of elements, or INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.

    Args:
        dataset: The data set.

    Returns:
        The number.
    """
    return dataset.cardinality()


def get_single_element(dataset: Dataset) -> Any:
    """Returns the element of a data set that has exactly one.

    Args:
        dataset: The data set.

    Returns:
        The element.
    """
    return dataset.get_single_element()


def get_structure(dataset_or_iterator: Dataset | DatasetIterator) -> Any:
    """Returns the nest of TensorSpecs of the elements.

    Args:
        dataset_or_iterator: The data set, or an iterator of one.

    Returns:
        Its `element_spec`.
    """
    return dataset_or_iterator.element_spec


def get_next_as_optional(iterator: LiftedIterator) -> Optional:
    """Returns the next element if there is one, and says so.

    Args:
        iterator: The iterator.

    Returns:
        An object with `has_value()` and `get_value()`.
    """
    return iterator.get_next_as_optional()


def save(
    dataset: Dataset,
    path: check.Path,
    compression: str | None = None,
    shard_func: Callable[..., Any] | None = None,
    name: str | None = None,
) -> None:
    """Writes all elements to a directory, from which `Dataset.load` reads them.

    Args:
        dataset: The data set.
        path: The directory; a data set that was saved there before is replaced.
        compression: "GZIP", or None.
        shard_func: Returns the number of the file that an element is written to; None for one file.
        name: Accepted, without effect.
    """
    dataset.save(path, compression, shard_func, name)

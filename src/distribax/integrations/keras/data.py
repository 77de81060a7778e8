"""Data sets of distribax as input of Keras's loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from distribax import contracts
from distribax.data.dataset import Dataset
from distribax.data.distributed import DistributedDataset
from distribax.data.distributed.distributed_dataset import PerReplicaSpec, distribute_dataset
from distribax.integrations.keras.private_names import find_private_names


class DatasetAdapter(find_private_names().data_adapter):  # type: ignore[misc]
    """Feeds a loop from a `dx.data.Dataset`, or from a distributed data set."""

    def __init__(self, dataset: Dataset | DistributedDataset) -> None:
        self.dataset = dataset

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the batches of an epoch."""
        return iter(self.dataset)

    get_jax_iterator = get_numpy_iterator

    @property
    def num_batches(self) -> int | None:
        """The number of batches of an epoch, if it is known."""
        count = self.dataset.cardinality() if isinstance(self.dataset, Dataset) else -1
        return count if count >= 0 else None

    @property
    def batch_size(self) -> int | None:
        """The size of a batch, which only the batches tell."""
        return None

    has_partial_batch = None
    partial_batch_size = None


def adapt_input(
    strategy: contracts.Strategy, given: dict[str, Any], model: keras.Model, what: str
) -> dict[str, Any]:
    """Returns the arguments of a loop, with an adapter in place of a distribax data set."""
    given = dict(given)
    validation = given.get("validation_data")
    if isinstance(validation, (Dataset, DistributedDataset)):
        given["validation_data"] = _make_adapter(strategy, validation)
    dataset = given.get("x")
    if not isinstance(dataset, (Dataset, DistributedDataset)):
        return given
    for name in ("y", "sample_weight"):
        if given.get(name) is not None:
            raise ValueError(
                f"{what}: {name} was given beside a data set. The elements of a data set are "
                "batches (x, y) or (x, y, sample_weight); put it there."
            )
    class_weight = given.pop("class_weight", None)
    if class_weight is not None:
        dataset = add_weights(dataset, class_weight, what)
    given["x"] = _make_adapter(strategy, dataset)
    if "shuffle" in given:
        given["shuffle"] = False
    if isinstance(given["x"].dataset, DistributedDataset):
        _build(model, given["x"].dataset.element_spec)
    return given


def _make_adapter(
    strategy: contracts.Strategy, dataset: Dataset | DistributedDataset
) -> DatasetAdapter:
    target = strategy.extended.input_target()
    if isinstance(dataset, Dataset) and target.num_workers > 1:
        # As it says itself: each worker reads its own part.
        dataset = distribute_dataset(dataset, target)
    return DatasetAdapter(dataset)


def add_weights(dataset: object, class_weight: dict[int, float], what: str) -> Dataset:
    """Returns a data set of batches (x, y), with the weights of their classes beside them.

    Args:
        dataset: The data set.
        class_weight: The weights, by class; of others it is 1.
        what: The method that is called, for messages.

    Raises:
        ValueError: It is not a `dx.data.Dataset`.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{what}: class_weight was given beside a {type(dataset).__name__}, to whose batches "
            "weights cannot be added. Pass a dx.data.Dataset, or batches (x, y, sample_weight)."
        )
    size = max(class_weight) + 1
    table = np.array([class_weight.get(number, 1.0) for number in range(size)], np.float32)

    def add(x: Any, y: Any, weight: Any = None) -> tuple[Any, Any, np.ndarray]:
        if weight is not None:
            raise ValueError(
                f"{what}: class_weight was given beside a data set whose batches have sample "
                "weights already. Leave out one of them."
            )
        labels = np.asarray(y)
        if labels.ndim > 1:
            labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=-1)
        known = labels < size
        return x, y, np.where(known, table[np.where(known, labels, 0).astype(int)], 1.0)

    return dataset.map(add)


def _build(model: keras.Model, spec: Any) -> None:
    """Builds a model for batches that are divided already, of which Keras cannot read the shape."""
    is_spec = lambda leaf: isinstance(leaf, PerReplicaSpec)  # noqa: E731
    pieces = jax.tree.map(
        lambda leaf: leaf.specs[0] if is_spec(leaf) else leaf, spec, is_leaf=is_spec
    )
    shapes = jax.tree.map(
        lambda leaf: keras.KerasTensor((None, *leaf.shape[1:]), str(np.dtype(leaf.dtype))), pieces
    )
    model._symbolic_build(data_batch=shapes)

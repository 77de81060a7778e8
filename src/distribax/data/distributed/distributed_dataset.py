"""`DistributedDataset`: a data set that gives each replica its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from distribax.data.adapt import as_dataset
from distribax.data.dataset import Dataset
from distribax.data.dataset_options import AutoShardPolicy
from distribax.data.distributed.agreed_steps import AgreedSteps
from distribax.data.distributed.distributed_iterator import DistributedIterator
from distribax.data.distributed.feed import Feeder
from distribax.data.distributed.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    checked_options,
    context_of_worker,
    contexts_of_replicas,
)
from distribax.data.distributed.steps import DequeueSteps, SplitSteps, Steps
from distribax.data.rewrites.autoshard import auto_shard
from distribax.execution import require_host
from distribax.topology import InputTarget
from distribax.types import Nest


@dataclass(frozen=True)
class PerReplicaSpec:
    """The shape and data type of a value in each replica."""

    specs: tuple[Any, ...]


class DistributedDataset:
    """A data set whose elements are distributed values; iterate it as often as you like.

    Made by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`.
    """

    def __init__(
        self,
        start: Callable[[], Steps],
        spec: Callable[[], Any],
        target: InputTarget,
        options: InputOptions,
        shard: dict[str, Any],
    ) -> None:
        self._start = start
        self._spec = spec
        self._feeder = Feeder(target, options.experimental_fetch_to_device)
        self._buffer_size = options.experimental_per_replica_buffer_size
        self._shard = shard

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements, for each replica."""
        return self._spec()

    def __iter__(self) -> DistributedIterator:
        require_host("a loop over a distributed data set")
        return DistributedIterator(
            self._start, self._feeder, self._buffer_size, self._spec, self._shard
        )

    def make_one_shot_iterator(self) -> DistributedIterator:
        """Returns an iterator, under TensorFlow 1's name."""
        return iter(self)

    def make_initializable_iterator(self) -> DistributedIterator:
        """Returns an iterator, under TensorFlow 1's name; it needs no initialising."""
        return iter(self)


def distribute_dataset(
    dataset: Any, target: InputTarget, options: InputOptions | None = None
) -> DistributedDataset:
    """Divides a data set of global batches among the workers' replicas."""
    options = checked_options(options)
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            "experimental_distribute_dataset: the data set is distributed already. Pass the "
            "ordinary data set that it was made of."
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise ValueError(
            "experimental_distribute_dataset: InputReplicationMode.PER_REPLICA needs an input "
            "function for each replica. Use distribute_datasets_from_function(fn, options)."
        )
    part, decision = auto_shard(
        as_dataset(dataset),
        target.num_workers,
        target.worker_id,
        replicas_per_worker=target.num_local_replicas,
        split=True,
    )
    # With DATA, and with one worker, a position is that of the global batch, whoever saved it.
    together = decision.policy is AutoShardPolicy.DATA or target.num_workers == 1
    pieces = lambda: part.element_spec[0]  # noqa: E731
    return DistributedDataset(
        lambda: SplitSteps(part) if together else AgreedSteps(SplitSteps(part), target, pieces()),
        lambda: _merged_spec(part.element_spec),
        target,
        options,
        _shard(target, "global" if together else "per_worker"),
    )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    target: InputTarget,
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Feeds each replica a batch of the data set that `dataset_fn` makes for this worker."""
    options = checked_options(options)
    if not callable(dataset_fn):
        raise TypeError(
            f"distribute_datasets_from_function: dataset_fn={dataset_fn!r} is not callable. "
            "Expected a function of a dx.InputContext that returns a data set; to distribute a "
            "data set itself use experimental_distribute_dataset."
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        contexts = contexts_of_replicas(target)
    else:
        contexts = [context_of_worker(target)]
    datasets = [_called(dataset_fn, context) for context in contexts]

    def start() -> Steps:
        steps = DequeueSteps(datasets, target.num_local_replicas)
        if target.num_workers == 1:
            return steps
        return AgreedSteps(steps, target, datasets[0].element_spec)

    return DistributedDataset(
        start,
        lambda: _merged_spec(
            tuple(
                datasets[index % len(datasets)].element_spec
                for index in range(target.num_local_replicas)
            )
        ),
        target,
        options,
        _shard(target, "global" if target.num_workers == 1 else "per_worker"),
    )


def _called(dataset_fn: Callable[[InputContext], Any], context: InputContext) -> Dataset:
    made = dataset_fn(context)
    if made is None:
        raise ValueError(
            "distribute_datasets_from_function: dataset_fn returned None. Return the data set."
        )
    return as_dataset(made)


def _shard(target: InputTarget, kind: str) -> dict[str, Any]:
    if kind == "global":
        return {"kind": kind}
    return {"kind": kind, "num_workers": target.num_workers, "worker_id": target.worker_id}


def _merged_spec(pieces: tuple[Nest, ...]) -> Nest:
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree.map(lambda *specs: PerReplicaSpec(specs), *pieces)

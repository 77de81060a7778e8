"""`DistributedDataset`: a data set that gives each replica its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from distribax import contracts
from distribax.data.adapt import as_dataset
from distribax.data.dataset import Dataset
from distribax.data.dataset_options import AutoShardPolicy
from distribax.data.distributed.distributed_iterator import (
    DistributedIterator,
    require_outside_replica,
)
from distribax.data.distributed.feed import Feeder
from distribax.data.distributed.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    check_options,
    list_contexts,
)
from distribax.data.distributed.position_owner import PositionOwner
from distribax.data.distributed.step_agreement import StepAgreement
from distribax.data.distributed.step_batches import DequeueSteps, SplitSteps, Steps
from distribax.data.element_spec import Spec
from distribax.data.numpy_rows import NumpyRows
from distribax.data.plan.passes import number_steps
from distribax.data.rewrites.autoshard import auto_shard
from distribax.execution import require_host


@dataclass(frozen=True)
class PerReplicaSpec:
    """The shape and data type of a value in each replica.

    Attributes:
        specs: A `dx.data.TensorSpec` for each replica.
    """

    specs: tuple[Spec, ...]


class DistributedDataset:
    """A data set whose elements are distributed values; iterate it as often as you like.

    Made by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`.

    Args:
        start: Starts the pipeline that feeds this worker.
        spec: Returns the shapes and data types of the elements.
        target: The replicas that are fed.
        options: How they are fed.
        owner: Whose positions the iterators save.
    """

    def __init__(
        self,
        start: Callable[[], Steps],
        spec: Callable[[], Spec],
        target: contracts.InputTarget,
        options: InputOptions,
        owner: PositionOwner,
    ) -> None:
        self._start = start
        self._spec = spec
        self._feeder = Feeder(target, options.experimental_fetch_to_device)
        self._buffer_size = options.experimental_per_replica_buffer_size
        self._owner = owner

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements, for each replica."""
        return self._spec()

    def __iter__(self) -> DistributedIterator:
        require_outside_replica("a loop over a distributed data set")
        require_host("a loop over a distributed data set")
        return DistributedIterator(
            self._start, self._feeder, self._buffer_size, self._spec, self._owner
        )

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through the data set once, and returns what a function makes of its elements.

        Args:
            initial_state: The state of the first call: anything.
            reduce_func: Called outside the replicas with a state and an element; returns the next
                state. It may call `strategy.run` and `strategy.reduce`.

        Returns:
            The last state.

        Raises:
            ReplicaInputError: It is called in a replica.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def make_one_shot_iterator(self) -> DistributedIterator:
        """Returns an iterator, under TensorFlow 1's name."""
        return iter(self)

    def make_initializable_iterator(self) -> DistributedIterator:
        """Returns an iterator, under TensorFlow 1's name; it needs no initialization."""
        return iter(self)


def distribute_dataset(
    dataset: object, target: contracts.InputTarget, options: InputOptions | None = None
) -> DistributedDataset:
    """Divides a data set of global batches among the workers' replicas."""
    options = check_options(options)
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            "experimental_distribute_dataset: the data set is distributed already. Pass the "
            "ordinary data set that it was made from."
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise ValueError(
            "experimental_distribute_dataset: InputReplicationMode.PER_REPLICA needs an input "
            "function for each replica. Use distribute_datasets_from_function(fn, options)."
        )
    whole = as_dataset(dataset)
    if isinstance(whole, NumpyRows):
        whole = whole.batch_for(target.num_replicas_in_sync)
    if target.num_workers > 1:
        number_steps(whole.plan, (target.num_workers, target.worker_id))
    part, decision = auto_shard(
        whole,
        target.num_workers,
        target.worker_id,
        replicas_per_worker=target.num_local_replicas,
        split=True,
    )
    # With DATA, and with one worker, a position is that of the global batch, whoever saved it.
    together = decision.policy is AutoShardPolicy.DATA or target.num_workers == 1
    return DistributedDataset(
        lambda: SplitSteps(
            part, None if together else StepAgreement(target, lambda: part.element_spec[0])
        ),
        lambda: _merge_specs(part.element_spec),
        target,
        options,
        PositionOwner() if together else PositionOwner(target.num_workers, target.worker_id),
    )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], object],
    target: contracts.InputTarget,
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Feeds each replica a batch of the data set that `dataset_fn` makes for this worker."""
    options = check_options(options)
    if not callable(dataset_fn):
        raise TypeError(
            f"distribute_datasets_from_function: dataset_fn={dataset_fn!r} is not callable. "
            "Expected a function of a dx.InputContext that returns a data set; to distribute a "
            "data set itself use experimental_distribute_dataset."
        )
    contexts = list_contexts(target, options.experimental_replication_mode)
    datasets = [_call(dataset_fn, context) for context in contexts]

    alone = target.num_workers == 1
    return DistributedDataset(
        lambda: DequeueSteps(
            datasets,
            target.num_local_replicas,
            None if alone else StepAgreement(target, lambda: datasets[0].element_spec),
        ),
        lambda: _merge_specs(
            tuple(
                datasets[index % len(datasets)].element_spec
                for index in range(target.num_local_replicas)
            )
        ),
        target,
        options,
        PositionOwner(target.num_workers, target.worker_id),
    )


def _call(dataset_fn: Callable[[InputContext], object], context: InputContext) -> Dataset:
    dataset = dataset_fn(context)
    if dataset is None:
        raise ValueError(
            "distribute_datasets_from_function: dataset_fn returned None. Return the data set."
        )
    return as_dataset(dataset)


def _merge_specs(pieces: tuple[Spec, ...]) -> Spec:
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree.map(lambda *specs: PerReplicaSpec(specs), *pieces)

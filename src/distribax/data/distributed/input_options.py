"""What an input function gets to know, and how input can be tuned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distribax import contracts
from distribax.data import arguments as check
from distribax.types import ParsedEnum


class InputReplicationMode(ParsedEnum):
    """Whether an input function is called once for each worker, or once for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputContext:
    """The place of a pipeline among those that feed a strategy, passed to a `dataset_fn`.

    Attributes:
        num_input_pipelines: How many pipelines feed the replicas: one for each worker.
        input_pipeline_id: Which of them this is.
        num_replicas_in_sync: How many replicas there are over all workers.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        count = check.positive(self.num_input_pipelines, "num_input_pipelines")
        number = check.whole_number(self.input_pipeline_id, "input_pipeline_id")
        check.positive(self.num_replicas_in_sync, "num_replicas_in_sync")
        if not 0 <= number < count:
            raise ValueError(
                f"input_pipeline_id={number} is outside 0 to {count - 1} (num_input_pipelines - 1)."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Args:
            global_batch_size: The batch size of all replicas together.

        Returns:
            The global batch size over the number of replicas.

        Raises:
            ValueError: The global batch size does not divide evenly.

        >>> InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(8)
        4
        """
        batch_size = check.positive(global_batch_size, "global_batch_size")
        size, rest = divmod(batch_size, self.num_replicas_in_sync)
        if rest:
            near = size * self.num_replicas_in_sync
            raise ValueError(
                f"get_per_replica_batch_size: global_batch_size={global_batch_size} does not "
                f"divide by the {self.num_replicas_in_sync} replicas. Use "
                f"{near or self.num_replicas_in_sync} or {near + self.num_replicas_in_sync}."
            )
        return size


@dataclass(frozen=True)
class InputOptions:
    """How a distributed data set is fed to the devices.

    Attributes:
        experimental_fetch_to_device: Whether batches are put on the replicas' devices ahead of use;
            otherwise replicas get host arrays.
        experimental_replication_mode: Whether an input function is called for each worker or for
            each replica.
        experimental_place_dataset_on_device: Must be False, as data sets run on the host.
        experimental_per_replica_buffer_size: How many batches of each replica are made ahead of
            use; 0 makes each batch when it is asked for.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        for name in ("experimental_fetch_to_device", "experimental_place_dataset_on_device"):
            check.flag(getattr(self, name), f"InputOptions: {name}")
        if self.experimental_place_dataset_on_device:
            raise ValueError(
                "InputOptions: experimental_place_dataset_on_device=True is not possible: data "
                "sets run on the host. Leave it out; batches are put on the devices ahead of use."
            )
        mode = InputReplicationMode.parse(
            self.experimental_replication_mode, "experimental_replication_mode"
        )
        object.__setattr__(self, "experimental_replication_mode", mode)
        size = self.experimental_per_replica_buffer_size
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ValueError(
                f"InputOptions: experimental_per_replica_buffer_size={size!r} is not a count of "
                "batches. Expected an int of at least 0."
            )


def list_contexts(
    target: contracts.InputTarget, mode: InputReplicationMode | str
) -> list[InputContext]:
    """Returns the contexts of a `dataset_fn`, which is called for each of them."""
    count = target.num_replicas_in_sync
    if mode is InputReplicationMode.PER_WORKER:
        return [InputContext(target.num_workers, target.worker_id, count)]
    first = target.worker_id * target.num_local_replicas
    return [InputContext(count, first + i, count) for i in range(target.num_local_replicas)]


def check_options(options: InputOptions | None) -> InputOptions:
    """Returns `options`, or the defaults for None."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(
            f"options={options!r} is not a dx.InputOptions. Options of the data set itself "
            "(dx.data.Options) are set with dataset.with_options(options)."
        )
    return options

"""Scheduling functions on workers: `dx.coordinator`, as `tf.distribute.coordinator`."""

from distribax.coordinator.coordinator import ClusterCoordinator as ClusterCoordinator
from distribax.coordinator.per_worker import PerWorkerDataset as PerWorkerDataset
from distribax.coordinator.per_worker import PerWorkerIterator as PerWorkerIterator
from distribax.coordinator.per_worker import PerWorkerValues as PerWorkerValue
from distribax.coordinator.per_worker import PerWorkerValues as PerWorkerValues
from distribax.coordinator.remote_value import RemoteValue as RemoteValue
from distribax.coordinator.remote_value import RemoteValueStatus as RemoteValueStatus
from distribax.coordinator.status import CoordinatorStatus as CoordinatorStatus
from distribax.coordinator.status import WorkerState as WorkerState
from distribax.coordinator.status import WorkerStatus as WorkerStatus
from distribax.coordinator.worker import (
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)
from distribax.errors import ClosureCancelledError as ClosureCancelledError
from distribax.errors import RemoteError as RemoteError
from distribax.errors import WorkersLostError as WorkersLostError

__all__ = [
    "ClosureCancelledError",
    "ClusterCoordinator",
    "CoordinatorStatus",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteError",
    "RemoteValue",
    "RemoteValueStatus",
    "WorkerState",
    "WorkerStatus",
    "WorkersLostError",
    "experimental_get_current_worker_index",
]

"""distribax: the programming model of tf.distribute, for JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from distribax import experimental as experimental
from distribax import integrations as integrations
from distribax.cluster.peers.last_words import on_peer_lost as on_peer_lost
from distribax.collectives import AllReduce as AllReduce
from distribax.collectives import CommunicationImplementation as CommunicationImplementation
from distribax.collectives import CommunicationOptions as CommunicationOptions
from distribax.collectives import CrossDeviceOps as CrossDeviceOps
from distribax.collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from distribax.collectives import NcclAllReduce as NcclAllReduce
from distribax.collectives import ReductionToOneDevice as ReductionToOneDevice
from distribax.context import ReplicaContext as ReplicaContext
from distribax.context import experimental_set_strategy as experimental_set_strategy
from distribax.context import get_loss_reduction as get_loss_reduction
from distribax.context import get_replica_context as get_replica_context
from distribax.context import has_strategy as has_strategy
from distribax.context import in_cross_replica_context as in_cross_replica_context
from distribax.errors import CollectiveMismatchError as CollectiveMismatchError
from distribax.errors import CollectiveTimeoutError as CollectiveTimeoutError
from distribax.errors import DamagedCheckpointError as DamagedCheckpointError
from distribax.errors import DistribaxError as DistribaxError
from distribax.errors import OutOfRangeError as OutOfRangeError
from distribax.errors import ParameterServerError as ParameterServerError
from distribax.errors import ParameterServerUnreachableError as ParameterServerUnreachableError
from distribax.errors import ParametersLostError as ParametersLostError
from distribax.errors import PeerLostError as PeerLostError
from distribax.errors import ReplicaInputError as ReplicaInputError
from distribax.errors import UnsupportedKerasError as UnsupportedKerasError
from distribax.errors import VariableInJitError as VariableInJitError
from distribax.execution import function as function
from distribax.progress import get_progress as get_progress
from distribax.progress import set_progress as set_progress
from distribax.strategies import CentralStorageStrategy as CentralStorageStrategy
from distribax.strategies import MirroredStrategy as MirroredStrategy
from distribax.strategies import OneDeviceStrategy as OneDeviceStrategy
from distribax.strategies import Strategy as Strategy
from distribax.strategies import StrategyExtended as StrategyExtended
from distribax.strategies import (
    experimental_make_numpy_dataset as experimental_make_numpy_dataset,
)
from distribax.strategies import get_strategy as get_strategy
from distribax.topology import get_soft_device_placement as get_soft_device_placement
from distribax.topology import set_soft_device_placement as set_soft_device_placement
from distribax.topology import set_virtual_cpu_devices as set_virtual_cpu_devices
from distribax.training import metrics as metrics
from distribax.training.checkpoints.checkpoint import Checkpoint as Checkpoint
from distribax.training.checkpoints.checkpoint_manager import (
    CheckpointManager as CheckpointManager,
)
from distribax.training.gradients import value_and_grad as value_and_grad
from distribax.training.losses import compute_average_loss as compute_average_loss
from distribax.training.losses import scale_regularization_loss as scale_regularization_loss
from distribax.training.optimizer import Optimizer as Optimizer
from distribax.training.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from distribax.training.preemption import TerminationConfig as TerminationConfig
from distribax.training.summary import Summary as Summary
from distribax.training.summary import VariableSummary as VariableSummary
from distribax.training.summary import summary as summary
from distribax.training.visualization import visualize as visualize
from distribax.types import ReduceOp as ReduceOp
from distribax.types import RunOptions as RunOptions
from distribax.types import ValueContext as ValueContext
from distribax.types import VariableAggregation as VariableAggregation
from distribax.types import VariableSynchronization as VariableSynchronization
from distribax.values import DistributedValues as DistributedValues
from distribax.values import IndexedSlices as IndexedSlices
from distribax.values import Mirrored as Mirrored
from distribax.values import PerReplica as PerReplica
from distribax.values import TensorShape as TensorShape
from distribax.values import group as group
from distribax.variables import ShardedVariable as ShardedVariable
from distribax.variables import Variable as Variable
from distribax.variables import embedding_lookup as embedding_lookup

if TYPE_CHECKING:
    from distribax import cluster_resolver as cluster_resolver
    from distribax import contrib as contrib
    from distribax import coordinator as coordinator
    from distribax import data as data
    from distribax import estimator as estimator
    from distribax import logging as logging
    from distribax import partitioners as partitioners
    from distribax import random as random
    from distribax import train as train
    from distribax.cluster import ClusterSpec as ClusterSpec
    from distribax.cluster import Server as Server
    from distribax.cluster.peers.cluster_secret import ClusterSecretError as ClusterSecretError
    from distribax.cluster.peers.meeting import ClusterTimeoutError as ClusterTimeoutError
    from distribax.cluster.ray.node import ClusterJoinError as ClusterJoinError
    from distribax.cluster.ray.server import ClusterLostError as ClusterLostError
    from distribax.cluster.resolvers.slurm.slurm import SlurmError as SlurmError
    from distribax.contrib.distribute import get_tower_context as get_tower_context
    from distribax.contrib.distribute import get_variable as get_variable
    from distribax.data.distributed import DistributedDataset as DistributedDataset
    from distribax.data.distributed import DistributedIterator as DistributedIterator
    from distribax.data.distributed import InputContext as InputContext
    from distribax.data.distributed import InputOptions as InputOptions
    from distribax.data.distributed import InputReplicationMode as InputReplicationMode
    from distribax.parameter_server.strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from distribax.strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from distribax.strategies.tpu import TPUStrategy as TPUStrategy
    from distribax.training.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
    from distribax.training.termination_watchers import (
        GCETerminationWatcher as GCETerminationWatcher,
    )
    from distribax.training.termination_watchers import (
        SignalTerminationWatcher as SignalTerminationWatcher,
    )

__version__ = "0.1.0"

# Loaded on use: with them, `import distribax` would take a quarter longer.
_ON_USE = {
    "contrib": "distribax.contrib",
    "ClusterJoinError": "distribax.cluster.ray.node",
    "ClusterLostError": "distribax.cluster.ray.server",
    "ClusterSpec": "distribax.cluster",
    "ClusterSecretError": "distribax.cluster.peers.cluster_secret",
    "ClusterTimeoutError": "distribax.cluster.peers.meeting",
    "Server": "distribax.cluster",
    "cluster_resolver": "distribax.cluster_resolver",
    "coordinator": "distribax.coordinator",
    "data": "distribax.data",
    "estimator": "distribax.estimator",
    "logging": "distribax.logging",
    "GCETerminationWatcher": "distribax.training.termination_watchers",
    "SignalTerminationWatcher": "distribax.training.termination_watchers",
    "get_tower_context": "distribax.contrib.distribute",
    "get_variable": "distribax.contrib.distribute",
    "partitioners": "distribax.partitioners",
    "random": "distribax.random",
    "train": "distribax.train",
    "DistributedDataset": "distribax.data.distributed",
    "DistributedIterator": "distribax.data.distributed",
    "InputContext": "distribax.data.distributed",
    "InputOptions": "distribax.data.distributed",
    "InputReplicationMode": "distribax.data.distributed",
    "MultiWorkerMirroredStrategy": "distribax.strategies.multi_worker",
    "ParameterServerStrategy": "distribax.parameter_server.strategy",
    "SidecarEvaluator": "distribax.training.sidecar_evaluator",
    "SlurmError": "distribax.cluster.resolvers.slurm.slurm",
    "TPUStrategy": "distribax.strategies.tpu",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        # Python itself asks for names like __path__, and is content with any AttributeError.
        from distribax.contrib.tensorflow_names import explain_missing

        raise AttributeError(explain_missing("distribax", name))
    module = importlib.import_module(_ON_USE[name])
    value = module if module.__name__ == f"distribax.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    machinery = {"Any", "TYPE_CHECKING", "importlib"}
    return sorted(({*globals(), *_ON_USE}) - machinery)

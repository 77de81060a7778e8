"""The tower API of TensorFlow 1.9: today's strategies, under the names they had then.

A *tower* is a replica, a `DistributionStrategy` is a view of a `dx.Strategy`.
"""

from distribax.collectives import AllReduce as AllReduceCrossTowerOps
from distribax.collectives import CrossDeviceOps as CrossTowerOps
from distribax.collectives import ReductionToOneDevice as ReductionToOneDeviceCrossTowerOps
from distribax.contrib.distribute.input import InitializableIterator as InitializableIterator
from distribax.contrib.distribute.input import PerDeviceDataset as PerDeviceDataset
from distribax.contrib.distribute.mirrored import MirroredStrategy as MirroredStrategy
from distribax.contrib.distribute.one_device import OneDeviceStrategy as OneDeviceStrategy
from distribax.contrib.distribute.strategy import DistributionStrategy as DistributionStrategy
from distribax.contrib.distribute.tower_context import TowerContext as TowerContext
from distribax.contrib.distribute.tower_context import (
    get_cross_tower_context as get_cross_tower_context,
)
from distribax.contrib.distribute.tower_context import (
    get_distribution_strategy as get_distribution_strategy,
)
from distribax.contrib.distribute.tower_context import get_tower_context as get_tower_context
from distribax.contrib.distribute.tower_context import (
    has_distribution_strategy as has_distribution_strategy,
)
from distribax.contrib.distribute.variable_store import AUTO_REUSE as AUTO_REUSE
from distribax.contrib.distribute.variable_store import VariableScope as VariableScope
from distribax.contrib.distribute.variable_store import get_variable_scope as get_variable_scope
from distribax.contrib.distribute.variable_store import reset_variable_store as reset_variable_store
from distribax.contrib.distribute.variable_store import variable_scope as variable_scope
from distribax.contrib.distribute.variables import get_variable as get_variable
from distribax.values import Mirrored as Mirrored
from distribax.values import PerReplica as PerDevice

__all__ = [
    "AUTO_REUSE",
    "AllReduceCrossTowerOps",
    "CrossTowerOps",
    "DistributionStrategy",
    "InitializableIterator",
    "Mirrored",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "PerDevice",
    "PerDeviceDataset",
    "ReductionToOneDeviceCrossTowerOps",
    "TowerContext",
    "VariableScope",
    "get_cross_tower_context",
    "get_distribution_strategy",
    "get_tower_context",
    "get_variable",
    "get_variable_scope",
    "has_distribution_strategy",
    "reset_variable_store",
    "variable_scope",
]

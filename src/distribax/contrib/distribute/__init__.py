"""The tower API of TensorFlow 1.9: today's strategies, under the names they had then.

A *tower* is a replica, a `DistributionStrategy` is a view of a `dx.Strategy`.
"""

from distribax.collectives import AllReduce as AllReduceCrossTowerOps
from distribax.collectives import CrossDeviceOps as CrossTowerOps
from distribax.collectives import ReductionToOneDevice as ReductionToOneDeviceCrossTowerOps
from distribax.contrib.distribute.input import InitializableIterator, PerDeviceDataset
from distribax.contrib.distribute.mirrored import MirroredStrategy
from distribax.contrib.distribute.one_device import OneDeviceStrategy
from distribax.contrib.distribute.strategy import DistributionStrategy
from distribax.contrib.distribute.tower_context import (
    TowerContext,
    get_cross_tower_context,
    get_distribution_strategy,
    get_tower_context,
    has_distribution_strategy,
)
from distribax.contrib.distribute.variable_store import (
    AUTO_REUSE,
    VariableScope,
    get_variable_scope,
    reset_variable_store,
    variable_scope,
)
from distribax.contrib.distribute.variables import get_variable
from distribax.values import Mirrored
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

"""Algorithms that combine the replicas' values: reductions, gathers, broadcasts."""

from distribax.collectives.all_reduce import AllReduce as AllReduce
from distribax.collectives.all_reduce import NcclAllReduce as NcclAllReduce
from distribax.collectives.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from distribax.collectives.hierarchical import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from distribax.collectives.reduction_to_one_device import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from distribax.types import CommunicationImplementation as CommunicationImplementation
from distribax.types import CommunicationOptions as CommunicationOptions

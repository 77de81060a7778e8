"""Devices: their names, virtual CPU devices and the mesh of replicas."""

from __future__ import annotations

from distribax.topology.cpu_pool import check_cpu_pool as check_cpu_pool
from distribax.topology.cpu_pool import count_cores as count_cores
from distribax.topology.cpu_pool import find_safe_pool_size as find_safe_pool_size
from distribax.topology.cpu_pool import launch_lock as launch_lock
from distribax.topology.device import complete_device_name as complete_device_name
from distribax.topology.device import device_name as device_name
from distribax.topology.device import get_soft_device_placement as get_soft_device_placement
from distribax.topology.device import resolve_device as resolve_device
from distribax.topology.device import resolve_devices as resolve_devices
from distribax.topology.device import set_soft_device_placement as set_soft_device_placement
from distribax.topology.input_target import InputTarget as InputTarget
from distribax.topology.mesh import REPLICA_AXIS as REPLICA_AXIS
from distribax.topology.mesh import (
    has_cpus_of_several_processes as has_cpus_of_several_processes,
)
from distribax.topology.mesh import list_local_devices as list_local_devices
from distribax.topology.mesh import make_replica_mesh as make_replica_mesh
from distribax.topology.restart import Renew as Renew
from distribax.topology.restart import follow as follow
from distribax.topology.virtual import set_virtual_cpu_devices as set_virtual_cpu_devices
from distribax.topology.virtual import size_pool_on_import as _size_pool_on_import

# The size of the pool is fixed when the backend starts, so it must be set on import; cpu_pool
# documents what is set, and when it is restored.
_size_pool_on_import()

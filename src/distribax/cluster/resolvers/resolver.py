"""The base of all cluster resolvers: which tasks there are, and which of them this process is."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import jax

from distribax import topology
from distribax.cluster.spec import roles
from distribax.cluster.spec.cluster_spec import ClusterSpec, task_index, task_type_name

_KINDS: Final = {"cuda": "GPU", "rocm": "GPU"}
"""What JAX names by its maker and users by what it is."""


def master_url(address: str, rpc_layer: str | None) -> str:
    """Returns the address with its protocol in front, if it has one.

    >>> master_url("host:2222", "grpc")
    'grpc://host:2222'
    """
    return f"{rpc_layer}://{address}" if address and rpc_layer else address


class ClusterResolver(abc.ABC):
    """Finds out the members of a cluster, and which of them this process is.

    A subclass says what the cluster is in `cluster_spec`. It may also know, from its surroundings,
    which task this process is: then it overrides `_found_task`. What a user sets explicitly, in a
    constructor or by assignment, always wins over what was found; 0 and '' are explicit too.

    >>> class Pair(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    >>> resolver = Pair()
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.master()
    'host1:2222'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster as it is now; nothing is remembered from an earlier call."""

    def _found_task(self) -> tuple[str | None, int | None]:
        """Returns the type and the index of this process' task, as its surroundings tell them."""
        return None, None

    def _found_rpc_layer(self) -> str | None:
        return None

    @property
    def task_type(self) -> str | None:
        """The job that this process is part of: 'chief', 'worker', 'ps', 'evaluator', or None."""
        return self._found_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = None if task_type is None else task_type_name(task_type, "task_type")

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if that means nothing here."""
        return self._found_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = None if task_id is None else task_index(task_id, "task_id")

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks, which `master` puts in front of addresses, or None."""
        return self._found_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def local_task_id(self) -> int | None:
        """The number of this process among those of its machine, or None if nobody tells it."""
        return None

    @property
    def environment(self) -> str:
        """The name of the environment that the program runs in; '' if it is nothing special."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, with the protocol; of this process' own if none is given.

        The answer is '' if it is not known which task this process is.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> Mapping[str, int]:
        """Returns how many accelerators of each kind a task has; this process if none is given.

        Those of other tasks are known once `jax.distributed` runs. This starts JAX's backend: ask
        after the strategy has been made.

        Args:
            config_proto: Not used; it is there so that code moves over unchanged.
        """
        del config_proto
        task = (task_type, task_id)
        if None in task or task == (self.task_type, self.task_id):
            devices = topology.resolve_devices()
        else:
            devices = self._devices_of(task_type, task_id)
        platforms: list[str] = [device.platform for device in devices]
        kinds = (_KINDS.get(platform, platform.upper()) for platform in platforms)
        return Counter(kind for kind in kinds if kind != "CPU")

    def _devices_of(self, task_type: str | None, task_id: int | None) -> tuple[jax.Device, ...]:
        """Returns the devices of another task; none if it is not in one run with this process."""
        tasks = roles.training_tasks(self.cluster_spec())
        if (task_type, task_id) not in tasks or jax.process_count() != len(tasks):
            return ()
        index = tasks.index((str(task_type), task_id or 0))
        return tuple(device for device in jax.devices() if device.process_index == index)

"""The base of all cluster resolvers: the tasks of a cluster, and the task of this process."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping
from typing import Final, Self

import jax

from distribax import topology
from distribax.cluster.spec import roles
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_index, parse_task_type

_KINDS: Final = {"cuda": "GPU", "rocm": "GPU"}
"""The platforms that JAX names after their vendors and users after what they are."""


def make_master_url(address: str, rpc_layer: str | None) -> str:
    """Returns the address with its protocol in front, if it has one.

    >>> make_master_url("host:2222", "grpc")
    'grpc://host:2222'
    """
    return f"{rpc_layer}://{address}" if address and rpc_layer else address


class ClusterResolver(abc.ABC):
    """Finds out the members of a cluster, and which of them this process is.

    A subclass defines `cluster_spec`. If the environment also tells which task this process is, it
    overrides `_find_task`; if it knows the accelerators of tasks, `_count_accelerators`; if
    environment variables announce such a cluster, `find_variables`. What a user sets explicitly, in
    a constructor or by assignment, always wins over what was found; 0 and '' are explicit too.

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

    @classmethod
    def detect(cls) -> Self | None:
        """Returns a resolver if this environment describes a cluster for it, None otherwise.

        A strategy that is given no resolver uses the first that is detected. A class that only
        reads its arguments, or must be told where to look, is never detected.
        """
        return cls() if cls.find_variables() else None

    @classmethod
    def find_variables(cls) -> list[str]:
        """Returns the environment variables that are set and announce a cluster of this kind.

        A subclass that returns some must have a constructor that needs no arguments.
        """
        return []

    def _find_task(self) -> tuple[str | None, int | None]:
        """Returns the type and the index of this process' task, as the environment gives them."""
        return None, None

    def _find_rpc_layer(self) -> str | None:
        """Returns the protocol that the environment gives."""
        return None

    @property
    def task_type(self) -> str | None:
        """The job that this process is part of: 'chief', 'worker', 'ps', 'evaluator', or None."""
        return self._find_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = None if task_type is None else parse_task_type(task_type, "task_type")

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if it has none."""
        return self._find_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = None if task_id is None else parse_task_index(task_id, "task_id")

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks, which `master` puts in front of addresses, or None."""
        return self._find_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def local_task_id(self) -> int | None:
        """The number of this process among those of its machine, or None if it is not known."""
        return None

    @property
    def environment(self) -> str | None:
        """The name of the environment that the program runs in; '' or None if it has none."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, with the protocol; that of this process by default.

        Args:
            task_type: The job of the task, by default that of this process.
            task_id: The index of the task, by default that of this process.
            rpc_layer: The protocol, by default that of the resolver.

        Returns:
            The address; '' if it is not known which task this process is.

        Raises:
            ValueError: The cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return make_master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """Returns how many accelerators of each kind a task has; this process by default.

        Those of other tasks are known once `jax.distributed` runs. The call starts JAX's backend:
        create the strategy first.

        Args:
            task_type: The job of the task, by default that of this process.
            task_id: The index of the task, by default that of this process.
            config_proto: Not used; it exists so that code moves over unchanged.

        Returns:
            The numbers by kind, such as {"GPU": 8}; without accelerators, an empty dict.
        """
        return self._count_accelerators(task_type, task_id)

    def _count_accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        """Returns what `num_accelerators` does."""
        task = (task_type, task_id)
        if None in task or task == (self.task_type, self.task_id):
            devices = topology.resolve_devices()
        else:
            devices = self._find_devices(task_type, task_id)
        platforms: list[str] = [device.platform for device in devices]
        kinds = (_KINDS.get(platform, platform.upper()) for platform in platforms)
        return Counter(kind for kind in kinds if kind != "CPU")

    def _find_devices(self, task_type: str | None, task_id: int | None) -> tuple[jax.Device, ...]:
        """Returns the devices of another task; none if it is not in the same run."""
        tasks = roles.list_training_tasks(self.cluster_spec())
        if (task_type, task_id) not in tasks or jax.process_count() != len(tasks):
            return ()
        index = tasks.index((str(task_type), task_id or 0))
        return tuple(device for device in jax.devices() if device.process_index == index)

"""A resolver that is given everything."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from distribax.cluster.resolvers.resolver import ClusterResolver, make_master_url
from distribax.cluster.spec.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns what it was given.

    Args:
        cluster_spec: The cluster.
        master: What `master()` returns if no task is given.
        task_type: The job of this process.
        task_id: The index of this process in its job.
        environment: The name of the environment.
        num_accelerators: What `num_accelerators()` returns for all tasks, such as {"GPU": 8}.
        rpc_layer: The protocol between tasks, such as "grpc".

    Raises:
        TypeError: `cluster_spec` is not a ClusterSpec, or `master` is not text.

    >>> cluster = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=1, rpc_layer="grpc")
    >>> resolver.task_type, resolver.task_id
    ('worker', 1)
    >>> resolver.master("worker", 0)
    'grpc://host0:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str | None = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec={cluster_spec!r} is a {type(cluster_spec).__name__}. Expected a "
                "ClusterSpec: write ClusterSpec({'worker': ['host0:2222', 'host1:2222']})."
            )
        if not isinstance(master, str):
            raise TypeError(
                f"master={master!r} is a {type(master).__name__}. Expected an address, or ''."
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = num_accelerators
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that was given."""
        return self._cluster_spec

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return make_master_url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    @override
    def environment(self) -> str | None:
        """The name of the environment that was given."""
        return self._environment

    @override
    def _count_accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        return {} if self._num_accelerators is None else self._num_accelerators

"""A resolver that joins several others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.cluster_spec import ClusterSpec

_Tasks = list[str] | dict[int, str]


class UnionResolver(ClusterResolver):
    """Joins the clusters of several resolvers; everything else comes from the first one.

    So `master()` without a task is that of the first resolver, too.

    Args:
        *resolvers: The resolvers, at least one.
        task_type: The job of this process, instead of the first resolver's.
        task_id: The index of this process, instead of the first resolver's.
        rpc_layer: The protocol, instead of the first resolver's.
        **unknown: Refused.

    Raises:
        TypeError: One of them is not a ClusterResolver.
        ValueError: There is none, or there is no such parameter.

    >>> from distribax.cluster.resolvers.simple import SimpleClusterResolver
    >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["w0:1"]}), task_type="worker")
    >>> more = SimpleClusterResolver(ClusterSpec({"worker": ["w1:1"], "ps": ["p0:1"]}))
    >>> UnionResolver(workers, more, task_id=0).cluster_spec()
    ClusterSpec({'ps': ['p0:1'], 'worker': ['w0:1', 'w1:1']})
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ValueError(
                f"UnionResolver: there are no parameters {', '.join(map(repr, unknown))}. Expected "
                "resolvers, task_type, task_id and rpc_layer; everything else comes from the first "
                "resolver."
            )
        if not resolvers:
            raise ValueError("UnionResolver() has nothing to join. Give at least one resolver.")
        for i, resolver in enumerate(resolvers):
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"resolvers[{i}]={resolver!r} is a {type(resolver).__name__}. Expected a "
                    "ClusterResolver."
                )
        self._resolvers = resolvers
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs of all resolvers.

        A job that several describe with a list gets the tasks of all, in the order of the
        resolvers. An address that an earlier one has listed is not repeated, so that a resolver can
        be put before another one for the same cluster, to override its answers. If one of them
        describes a job with a dict, the lists of the others are treated as dicts, too.

        Raises:
            KeyError: Two resolvers give the same task of such a job different addresses.
        """
        jobs: dict[str, list[_Tasks]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                jobs.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _join_tasks(job, parts) for job, parts in jobs.items()})

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        rpc_layer = self._rpc_layer if rpc_layer is None else rpc_layer
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    @override
    def _find_task(self) -> tuple[str | None, int | None]:
        first = self._resolvers[0]
        return first.task_type, first.task_id

    @override
    def _find_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer

    @property
    @override
    def local_task_id(self) -> int | None:
        """What the first resolver returns."""
        return self._resolvers[0].local_task_id

    @property
    @override
    def environment(self) -> str | None:
        """What the first resolver returns."""
        return self._resolvers[0].environment

    @override
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _join_tasks(job: str, parts: Sequence[_Tasks]) -> _Tasks:
    """Returns the tasks that several resolvers have for one job."""
    parts = [part for part in parts if part]
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return list(dict.fromkeys(address for part in lists for address in part))
    joined: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        for i, address in tasks.items():
            if joined.setdefault(i, address) != address:
                raise KeyError(
                    f"cluster_spec: the task {i} of the job {job!r} is {joined[i]!r} for one "
                    f"resolver and {address!r} for a later one. Give each index one address."
                )
    return joined

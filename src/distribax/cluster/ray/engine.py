"""Ray as the engine of parameter-server training: where its processes come from, and their end.

Three ways lead to an `Engine`: `embedded` starts Ray on this machine, `from_resolver` makes this
process the coordinator of a cluster of `dx.Server`s, and `from_address` uses a Ray cluster that is
there already. What runs on it is the same.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from distribax.cluster.ray import ray_session
from distribax.cluster.ray.cluster_token import (
    TOKEN_VARIABLE,
    given_token,
    new_token,
    process_token,
)
from distribax.cluster.ray.node import NODE_FOLDER_VARIABLE, ClusterJoinError, NodeSettings
from distribax.cluster.ray.ray_session import RaySession
from distribax.cluster.ray.task_nodes import (
    LOOPBACK,
    actor_resource,
    claim,
    described,
    is_local,
    node_settings,
    task_host,
    task_resource,
    visitor_settings,
)
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver
from distribax.cluster.spec.cluster_spec import ClusterSpec
from distribax.cluster.spec.roles import check_member

_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Place:
    """Where an actor is to be, in Ray's words, and the address that a server has there."""

    options: Mapping[str, Any] = field(default_factory=dict)
    host: str | None = None


@dataclass
class Engine:
    """The processes of a cluster, and how Ray is asked to start workers and servers on them.

    Attributes:
        num_workers: How many workers there are.
        num_servers: How many parameter servers there are.
        token: A secret of this engine, for connections that do not go through Ray.
        namespace: Ray's namespace of this engine's actors, "worker-0", "server-0" and so on.
    """

    num_workers: int
    num_servers: int
    _session: RaySession | None = field(repr=False)
    _workers: tuple[Place, ...] = field(repr=False)
    _servers: tuple[Place, ...] = field(repr=False)
    _snapshots: str | None = field(default=None, repr=False)
    token: str = field(default_factory=new_token, repr=False)
    namespace: str = field(default_factory=lambda: f"distribax-{secrets.token_hex(4)}")

    def worker_options(self, index: int) -> dict[str, Any]:
        """Returns Ray's options for the actor of a worker: `Worker.options(**options)`.

        Ray starts it again whenever it dies, and does not repeat what it was doing.
        """
        variables = _thread_pool(self.num_workers)
        return self._options(f"worker-{index}", self._workers[index], variables)

    def server_options(self, index: int) -> dict[str, Any]:
        """Returns Ray's options for the actor of a parameter server."""
        variables = {"JAX_PLATFORMS": "cpu", **_thread_pool(self.num_workers + self.num_servers)}
        return self._options(f"server-{index}", self._servers[index], variables)

    def _options(self, name: str, place: Place, variables: dict[str, str]) -> dict[str, Any]:
        options = {
            "name": name,
            "namespace": self.namespace,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": variables},
        }
        return options | dict(place.options)

    def server_host(self, index: int) -> str | None:
        """Returns the address that a parameter server listens on.

        None stands for that of the Ray node it is on: `ray.util.get_node_ip_address()` there.
        """
        return self._servers[index].host

    def snapshot_folder(self) -> Path:
        """Returns where servers save their state by default; it goes away with the cluster.

        The path is that of the server's machine, and may begin with an environment variable there:
        use `os.path.expandvars`.
        """
        folder = self._snapshots or os.path.join(tempfile.gettempdir(), self.namespace)
        return Path(folder, "snapshots")

    def close(self) -> None:
        """Ends the actors, and Ray itself if it was started for this engine; once is enough."""
        session, self._session = self._session, None
        if session is not None:
            session.release(self.namespace)


def embedded(num_workers: int = 2, num_servers: int = 1) -> Engine:
    """Starts Ray on this machine, reachable from this machine only; it ends with the program.

    Several engines of a program share one Ray, also one that the program has started itself.
    """
    session = ray_session.current() or ray_session.start(NodeSettings(new_token()))
    folder = session.folder
    return Engine(
        num_workers,
        num_servers,
        session.acquire(),
        (Place(),) * num_workers,
        (Place(host=LOOPBACK if folder else None),) * num_servers,
        None if folder is None else str(folder),
    )


def from_address(
    address: str, num_workers: int = 2, num_servers: int = 1, timeout: float = 60.0
) -> Engine:
    """Uses the Ray cluster at the address; "auto" is the one that this machine is a part of.

    Its token, if it has one, is found as Ray finds it. Workers and servers are spread over the
    machines, one processor each as far as there are enough.
    """
    session = ray_session.current(address) or ray_session.connect(address, timeout)
    enough = session.num_cpus() >= num_workers + num_servers
    place = Place({"num_cpus": 1 if enough else 0, "scheduling_strategy": "SPREAD"})
    workers, servers = (place,) * num_workers, (place,) * num_servers
    return Engine(num_workers, num_servers, session.acquire(), workers, servers)


def surrounding_resolver() -> ClusterResolver | None:
    """Returns the resolver of the cluster that TF_CONFIG describes, if it has parameter servers."""
    resolver = TFConfigClusterResolver()
    return resolver if "ps" in resolver.cluster_spec().jobs else None


def from_resolver(resolver: ClusterResolver, timeout: float = 600.0) -> Engine:
    """Makes this process the coordinator of the resolver's cluster, and waits for its servers.

    If the cluster has a chief, that is this process; else it is an additional one.
    """
    spec = resolver.cluster_spec()
    _check(spec, resolver.task_type, resolver.task_id)
    token = process_token()
    if "chief" in spec.jobs:
        settings = node_settings(spec, "chief", resolver.task_id or 0, token, timeout)
        claim(settings).close()  # Ray listens there itself.
    else:
        settings = visitor_settings(spec, token, timeout)
    deadline = time.monotonic() + timeout
    session = ray_session.start(settings)
    try:
        _await_servers(spec, deadline, timeout)
    except BaseException:
        session.end()
        raise
    local = is_local(spec)
    return Engine(
        spec.num_tasks("worker"),
        spec.num_tasks("ps"),
        session.acquire(),
        _places(spec, "worker"),
        _places(spec, "ps"),
        str(session.folder) if local else f"${NODE_FOLDER_VARIABLE}",
    )


def _check(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    for job in ("worker", "ps"):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise ValueError(
                f"cluster_resolver: the cluster has no task in the job {job!r}; it has "
                f"{spec.as_dict()}. Parameter-server training needs workers and servers."
            )
    if "chief" in spec.jobs and spec.num_tasks("chief") != 1:
        raise ValueError(
            f"cluster_resolver: the cluster has {spec.num_tasks('chief')} chiefs. Expected one."
        )
    if task_type in ("worker", "ps"):
        raise ValueError(
            f"cluster_resolver: this process is {task_type} {task_id}, but the coordinator makes "
            "the strategy. In workers and parameter servers run dx.Server(cluster_resolver).join() "
            "instead."
        )
    if task_type is not None:
        check_member(spec, task_type, task_id)


def _places(spec: ClusterSpec, job: str) -> tuple[Place, ...]:
    return tuple(
        Place({"resources": actor_resource(job, index)}, task_host(spec, job, index))
        for index in spec.task_indices(job)
    )


def _await_servers(spec: ClusterSpec, deadline: float, seconds: float) -> None:
    """Waits until the servers of all tasks are there; raises an error that names the missing."""
    tasks = [(job, index) for job in ("worker", "ps") for index in spec.task_indices(job)]
    while True:
        here = ray_session.resources()
        missing = [task for task in tasks if not task_resource(*task).keys() <= here.keys()]
        if not missing:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    names = ", ".join(described(spec, *task) for task in missing)
    joined = ", ".join(described(spec, *task) for task in tasks if task not in missing)
    hint = (
        "" if given_token() else f" This process was given no token: set {TOKEN_VARIABLE} in all."
    )
    raise ClusterJoinError(
        f"{names} did not join within {seconds:g} s; joined: {joined or 'nobody'}. Start "
        "dx.Server(cluster_resolver).join() there, and check that their addresses can be reached "
        f"from here.{hint}"
    )


def _thread_pool(num_processes: int) -> dict[str, str]:
    """Returns the variables for an XLA thread pool in each of so many processes of a machine.

    With a thread for each core in each of them they get in each other's way.
    """
    threads = str(max(1, _num_cores() // max(1, num_processes)))
    return {"PJRT_NPROC": threads, "NPROC": threads}


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

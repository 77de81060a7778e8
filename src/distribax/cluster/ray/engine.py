"""Ray as the engine of parameter-server training: where its processes run, and when they end.

There are three ways to get an `Engine`: `start_embedded` starts Ray on this machine,
`from_resolver` makes this process the coordinator of a cluster of `dx.Server`s, and `from_address`
uses a Ray cluster that is already running. What runs on the engine is the same.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from distribax import progress, topology
from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.missing_tasks import MissingTasks
from distribax.cluster.ray import ray_session
from distribax.cluster.ray.cluster_token import (
    TOKEN_VARIABLE,
    find_token,
    get_process_token,
    make_token,
)
from distribax.cluster.ray.node import ClusterJoinError
from distribax.cluster.ray.node_main import SNAPSHOT_FOLDER_VARIABLE, NodeSettings
from distribax.cluster.ray.ray_session import RaySession
from distribax.cluster.ray.task_nodes import (
    JOIN_SECONDS,
    LOOPBACK,
    claim_address,
    describe_task,
    find_task_host,
    is_local,
    make_actor_resource,
    make_node_settings,
    make_task_resource,
    make_visitor_settings,
)
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver
from distribax.cluster.spec.cluster_spec import ClusterSpec
from distribax.cluster.spec.roles import check_member, list_tasks
from distribax.topology.host_memory import stream_large_copies

_logger = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = read_seconds("DISTRIBAX_RAY_CONNECT_SECONDS", 60.0)
"""How long a Ray cluster that was started by others may take to answer."""
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Place:
    """Where an actor is to run.

    Attributes:
        options: Ray's options that put an actor there.
        host: The address on which a server listens there; None for that of the Ray node.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    host: str | None = None


@dataclass
class Engine:
    """A cluster, and the options with which Ray starts workers and servers on it.

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
    token: str = field(default_factory=make_token, repr=False)
    namespace: str = field(default_factory=lambda: f"distribax-{secrets.token_hex(4)}")

    def make_worker_options(self, index: int) -> dict[str, Any]:
        """Returns Ray's options for the actor of a worker: `Worker.options(**options)`.

        Ray starts it again whenever it dies, and does not repeat what it was doing.
        """
        variables = _size_thread_pool(self.num_workers)
        return self._make_options(f"worker-{index}", self._workers[index], variables)

    def make_server_options(self, index: int) -> dict[str, Any]:
        """Returns Ray's options for the actor of a parameter server."""
        variables = {
            "JAX_PLATFORMS": "cpu",
            **_size_thread_pool(self.num_workers + self.num_servers),
        }
        return self._make_options(f"server-{index}", self._servers[index], variables)

    def _make_options(self, name: str, place: Place, variables: dict[str, str]) -> dict[str, Any]:
        options = {
            "name": name,
            "namespace": self.namespace,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": variables | stream_large_copies(os.environ)},
        }
        return options | dict(place.options)

    def get_server_host(self, index: int) -> str | None:
        """Returns the address on which a parameter server listens.

        None means that of its Ray node: `ray.util.get_node_ip_address()` there.
        """
        return self._servers[index].host

    def get_snapshot_folder(self) -> Path:
        """Returns where servers save their state by default; it is removed with the cluster.

        It stays when a machine has lost the cluster, until the cluster has ended.

        The path is one of the server's machine and may begin with an environment variable that is
        set there: use `os.path.expandvars`.
        """
        folder = self._snapshots or os.path.join(tempfile.gettempdir(), self.namespace)
        return Path(folder, "snapshots")

    def close(self) -> None:
        """Ends the actors, and Ray if it was started for them; a second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            session.release(self.namespace)


def start_embedded(num_workers: int = 2, num_servers: int = 1) -> Engine:
    """Starts Ray on this machine, reachable only from this machine; it ends with the program.

    Several engines of a program share one Ray, even one that the program has started itself.
    """
    with progress.show("starting Ray on this machine"):
        session = ray_session.get_current() or ray_session.start(NodeSettings(make_token()))
    folder = session.snapshot_folder
    return Engine(
        num_workers,
        num_servers,
        session.acquire(),
        (Place(),) * num_workers,
        (Place(host=LOOPBACK if folder else None),) * num_servers,
        None if folder is None else str(folder),
    )


def from_address(
    address: str, num_workers: int = 2, num_servers: int = 1, timeout: float = _CONNECT_SECONDS
) -> Engine:
    """Returns an engine on the Ray cluster at an address.

    Its token, if it has one, is found as Ray finds it. Workers and servers are spread over the
    machines. Each gets a processor, if there are enough for all.

    Args:
        address: The address of the head, 'host:port', or "auto" for the cluster of this machine.
        num_workers: How many workers to run.
        num_servers: How many parameter servers to run.
        timeout: How many seconds to wait for the cluster.

    Raises:
        ClusterJoinError: The cluster does not answer, or has another token.
        RuntimeError: This process is connected to another Ray cluster.
    """
    session = ray_session.get_current(address) or ray_session.connect(address, timeout)
    is_large_enough = ray_session.get_resources().get("CPU", 0.0) >= num_workers + num_servers
    place = Place({"num_cpus": int(is_large_enough), "scheduling_strategy": "SPREAD"})
    workers, servers = (place,) * num_workers, (place,) * num_servers
    return Engine(num_workers, num_servers, session.acquire(), workers, servers)


def detect_resolver() -> ClusterResolver | None:
    """Returns the resolver of the cluster that TF_CONFIG describes, if it has parameter servers."""
    resolver = TFConfigClusterResolver()
    return resolver if "ps" in resolver.cluster_spec().jobs else None


def from_resolver(resolver: ClusterResolver, timeout: float = JOIN_SECONDS) -> Engine:
    """Makes this process the coordinator of the resolver's cluster, and waits for its servers.

    If the cluster has a chief, it is this process; otherwise the coordinator is an additional
    process.

    Args:
        resolver: The resolver that describes the cluster.
        timeout: How many seconds to wait for the servers.

    Raises:
        ClusterJoinError: Servers are missing, or this process could not join the cluster.
        ValueError: The cluster has no workers or no servers, or this process is one of them.
    """
    spec = resolver.cluster_spec()
    _check_coordinator(spec, resolver.task_type, resolver.task_id)
    token = get_process_token()
    if "chief" in spec.jobs:
        settings = make_node_settings(spec, "chief", resolver.task_id or 0, token, timeout)
        claim_address(settings).close()  # Ray itself listens there.
    else:
        settings = make_visitor_settings(spec, token, timeout)
    deadline = time.monotonic() + timeout
    with progress.show("joining the cluster") as wait:
        session = ray_session.start(settings)
        try:
            _await_servers(spec, deadline, timeout, MissingTasks(wait, deadline))
        except BaseException:
            session.end()
            raise
    local = is_local(spec)
    return Engine(
        spec.num_tasks("worker"),
        spec.num_tasks("ps"),
        session.acquire(),
        _make_places(spec, "worker"),
        _make_places(spec, "ps"),
        str(session.snapshot_folder) if local else f"${SNAPSHOT_FOLDER_VARIABLE}",
    )


def _check_coordinator(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
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
            f"cluster_resolver: this process is {task_type} {task_id}, but the coordinator creates "
            "the strategy. In workers and parameter servers run dx.Server(cluster_resolver).join() "
            "instead."
        )
    if task_type is not None:
        check_member(spec, task_type, task_id)


def _make_places(spec: ClusterSpec, job: str) -> tuple[Place, ...]:
    return tuple(
        Place({"resources": make_actor_resource(job, index)}, find_task_host(spec, job, index))
        for index in spec.task_indices(job)
    )


def _await_servers(
    spec: ClusterSpec, deadline: float, seconds: float, display: MissingTasks
) -> None:
    """Waits until the servers of all tasks have joined; raises an error that names the missing."""
    tasks = list_tasks(spec, ("worker", "ps"))
    while True:
        resources = ray_session.get_resources().keys()
        missing = [task for task in tasks if not make_task_resource(*task).keys() <= resources]
        if not missing:
            _logger.info("all %d servers have joined the cluster", len(tasks))
            return
        names = ", ".join(describe_task(spec, *task) for task in missing)
        display.tell(names)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    joined = ", ".join(describe_task(spec, *task) for task in tasks if task not in missing)
    hint = "" if find_token() else f" This process was given no token: set {TOKEN_VARIABLE} in all."
    raise ClusterJoinError(
        f"{names} did not join within {seconds:g} s; joined: {joined or 'nobody'}. Start "
        "dx.Server(cluster_resolver).join() there, and check that their addresses can be reached "
        f"from here.{hint}"
    )


def _size_thread_pool(num_processes: int) -> dict[str, str]:
    """Returns the variables that size the XLA thread pool of each of these processes.

    If each had a thread for every core of the machine, they would slow each other down.
    """
    threads = str(max(1, topology.count_cores() // max(1, num_processes)))
    return {"PJRT_NPROC": threads, "NPROC": threads}

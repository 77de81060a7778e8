"""The program of workers and parameter servers: it makes the process a task of a cluster."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, Self, runtime_checkable

from typing_extensions import override

from distribax.cluster.missing_tasks import REMIND_SECONDS
from distribax.cluster.ray.cluster_token import get_process_token
from distribax.cluster.ray.node import (
    ClusterJoinError,
    NodeFailedError,
    NodeLostError,
    RayNode,
)
from distribax.cluster.ray.node_main import NodeSettings
from distribax.cluster.ray.ports import find_quiet_ports
from distribax.cluster.ray.task_nodes import (
    JOIN_SECONDS,
    REJOIN_SECONDS,
    claim_address,
    describe_task,
    find_head_task,
    make_node_settings,
)
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.cluster_def import ClusterLike, ServerDef, ServerLike
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_index
from distribax.cluster.spec.roles import check_member
from distribax.errors import DetailedError
from distribax.types import PEER_LOST_EXIT_CODE

_logger = logging.getLogger(__name__)

_MAX_STARTS: Final = 3
"""How often Ray may fail to start here, on a machine that is very busy for example."""
_PROTOCOL: Final = "grpc"

Definition = ClusterSpec | ClusterResolver | ClusterLike | ServerLike | Mapping[str, Any]


@dataclass(frozen=True)
class ServerConfig:
    """How a server finds its cluster.

    Args:
        token: The cluster's secret, the same for all its processes. By default it is found where
            Ray finds it: in the environment variable RAY_AUTH_TOKEN, in the file that
            RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token.
        join_timeout_seconds: How long to wait for the head of the cluster to start. The
            environment variable DISTRIBAX_SERVER_JOIN_SECONDS changes the default, 600.
        rejoin_timeout_seconds: How long to try to join again when the cluster is lost: when its
            head is out of reach, or this machine was. The environment variable
            DISTRIBAX_SERVER_REJOIN_SECONDS changes the default, 300.

    Raises:
        ValueError: The token is empty, or a time is not more than 0.
    """

    token: str | None = None
    join_timeout_seconds: float = JOIN_SECONDS
    rejoin_timeout_seconds: float = REJOIN_SECONDS

    def __post_init__(self) -> None:
        if self.token is not None and (not isinstance(self.token, str) or not self.token.strip()):
            raise ValueError("ServerConfig: token: expected a text that is not empty.")
        for name in ("join_timeout_seconds", "rejoin_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"ServerConfig: {name}={getattr(self, name)!r}: expected more than 0 seconds."
                )


class ClusterLostError(DetailedError, SystemExit):
    """The cluster was lost, and could not be joined again in time.

    Not caught, it ends the program with exit code 43, upon which a supervisor starts it again.

    Attributes:
        code: The exit code.
        reason: What has happened.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = PEER_LOST_EXIT_CODE


@runtime_checkable
class ProtocolBuffer(Protocol):
    """A TensorFlow message, such as a ConfigProto."""

    def SerializeToString(self) -> bytes: ...


class Server:
    """Makes this process a worker or a parameter server of a cluster.

    The process owns a node of the cluster, on which the functions run that the coordinator
    schedules. The node ends with the process, for whatever reason that ends.

    Args:
        server_or_cluster_def: The cluster: a ClusterSpec, a dict from jobs to addresses, a
            ClusterResolver, a ClusterDef; or a ServerDef, also as a dict with the keys "cluster",
            "job_name", "task_index" and "protocol".
        job_name: The job of this process. It may be omitted if the cluster has only one job.
        task_index: The index of this process in its job. It may be omitted if the job has only one
            task.
        protocol: "grpc", which is the default.
        config: A ServerConfig. TensorFlow's ConfigProto is accepted, and has no effect.
        start: Whether to start at once.

    Raises:
        ClusterJoinError: The address of the task is in use, or not one of this machine.
        TypeError: `config` is not a ServerConfig.
        ValueError: The cluster has no such task, or the protocol is not "grpc".

    The whole program of a worker or a parameter server is:

        resolver = dx.cluster_resolver.TFConfigClusterResolver()
        dx.Server(resolver).join()
    """

    def __init__(
        self,
        server_or_cluster_def: Definition,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: ServerConfig | ProtocolBuffer | None = None,
        start: bool = True,
    ) -> None:
        if isinstance(config, ProtocolBuffer):
            _logger.warning("Server: config: a %s has no effect here.", type(config).__name__)
            config = None
        if config is not None and not isinstance(config, ServerConfig):
            raise TypeError(
                f"Server: config={config!r} is a {type(config).__name__}. Expected a "
                "distribax.cluster.ServerConfig."
            )
        given = _parse_definition(server_or_cluster_def)
        self._spec = given.spec
        self._job = _choose_job(given.spec, given.job_name if job_name is None else job_name)
        index = given.task_index if task_index is None else task_index
        self._index = _choose_index(given.spec, self._job, index)
        protocol = given.protocol if protocol is None else protocol
        if protocol not in (None, _PROTOCOL):
            raise ValueError(f"Server: protocol={protocol!r}: expected {_PROTOCOL!r}.")
        self._config = ServerConfig() if config is None else config
        self._node: RayNode | None = None
        self._claim: socket.socket | None = None
        # Why the cluster was lost, until it is joined again.
        self._loss: NodeLostError | None = None
        # How often Ray has failed to start since this was last part of the cluster.
        self._num_failures = 0
        self._closed = False
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: ServerConfig | None = None, start: bool = True) -> Server:
        """Returns a server that is a cluster by itself, on this machine: job "local", task 0.

        Args:
            config: A ServerConfig.
            start: Whether to start at once.

        Returns:
            The server.
        """
        (port,) = find_quiet_ports(1)
        return Server(ClusterSpec({"local": [f"localhost:{port}"]}), config=config, start=start)

    @property
    def target(self) -> str:
        """The address of this server."""
        return f"{_PROTOCOL}://{self._spec.task_address(self._job, self._index)}"

    @property
    def server_def(self) -> ServerDef:
        """The cluster, and which of its tasks this server is."""
        return ServerDef(self._spec.as_cluster_def(), self._job, self._index, _PROTOCOL)

    def start(self) -> None:
        """Starts this server, if it is not running, and returns before it has joined the cluster.

        Raises:
            ClusterJoinError: The address of the task is in use, or not one of this machine.
            RuntimeError: The server has been closed.
        """
        if self._closed:
            raise RuntimeError(f"Server: {self} has been closed. Create another one.")
        if self._node is not None:
            return
        settings = make_node_settings(
            self._spec,
            self._job,
            self._index,
            self._config.token or get_process_token(),
            self._config.join_timeout_seconds,
        )
        claimed = claim_address(settings)
        if settings.is_head:
            claimed.close()  # Ray itself listens there.
        else:
            self._claim = claimed
        self._node = RayNode(settings)
        # The node would end with the process anyway, but a little later.
        atexit.register(self.close)

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the coordinator has ended the cluster.

        If the cluster is lost meanwhile, because the head or this machine is out of reach, this
        waits until it can join again; the snapshots of a parameter server stay until the cluster
        has ended.

        Args:
            timeout: How many seconds to wait; by default without a limit.

        Returns:
            Whether the cluster has ended.

        Raises:
            ClusterJoinError: This server could not become part of the cluster, or has failed.
            ClusterLostError: The cluster was lost, and could not be joined again in time. If it is
                not caught, the program ends with exit code 43: start it again.
            RuntimeError: The server is not running.
        """
        if self._node is None:
            raise RuntimeError(f"Server: {self} is not running. Call start() before join().")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if not self._await_membership(deadline):
                    return False
                ended = self._node.wait_until_ended(_get_remaining(deadline))
            except NodeLostError as error:
                self._rejoin(error)
            except ClusterJoinError as error:
                self._num_failures += 1
                is_final = not isinstance(error, NodeFailedError)
                if is_final or self._num_failures >= _MAX_STARTS:
                    self._give_up(error)
                _logger.warning("%s. It tries again.", error)
                self._replace_node(self._node.settings)
            else:
                return ended

    def _await_membership(self, deadline: float | None) -> bool:
        """Waits until the node is part of the cluster; returns whether it is."""
        node = self._node
        assert node is not None
        while node.wait_until_up(_limit_wait(deadline)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            head = describe_task(self._spec, *find_head_task(self._spec))
            _logger.warning("%s waits for %s", self, head)
        self._loss, self._num_failures = None, 0
        return True

    def _give_up(self, error: ClusterJoinError) -> NoReturn:
        """Raises what `join` raises when the node cannot be part of the cluster."""
        if self._loss is None:
            raise error
        lost = ClusterLostError(f"{self._loss}; it could not join again: {error}")
        # Python prints nothing for an exception that is an exit.
        _logger.error("%s. The program ends with code %d.", lost, lost.code)
        raise lost from error

    def _rejoin(self, loss: NodeLostError) -> None:
        """Starts another node in the place of one that has lost the cluster."""
        node, seconds = self._node, self._config.rejoin_timeout_seconds
        assert node is not None
        self._loss = self._loss or loss
        _logger.warning("%s. It tries to join again for %g s.", loss, seconds)
        self._replace_node(dataclasses.replace(node.settings, timeout=seconds))

    def _replace_node(self, settings: NodeSettings) -> None:
        assert self._node is not None
        self._node.close()
        self._node = RayNode(settings)

    def close(self) -> None:
        """Removes this server from the cluster; a second call does nothing."""
        self._closed = True
        atexit.unregister(self.close)
        node, self._node = self._node, None
        if node is not None:
            node.close()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"Server({describe_task(self._spec, self._job, self._index)})"


@dataclass(frozen=True)
class _Given:
    """What the first argument says about the server."""

    spec: ClusterSpec
    job_name: str | None = None
    task_index: int | None = None
    protocol: str | None = None


def _parse_definition(given: Definition) -> _Given:
    if isinstance(given, ClusterResolver):
        return _Given(given.cluster_spec(), given.task_type, given.task_id, given.rpc_layer)
    if isinstance(given, ServerLike):
        return _Given(
            ClusterSpec(given.cluster), given.job_name, given.task_index, given.protocol or None
        )
    if isinstance(given, Mapping) and "cluster" in given and "job_name" in given:
        unknown = given.keys() - {"cluster", "job_name", "task_index", "protocol"}
        if unknown:
            raise ValueError(
                f"Server: server_or_cluster_def has the key {min(unknown)!r}. Expected 'cluster', "
                "'job_name', 'task_index' and 'protocol'."
            )
        rest = {key: value for key, value in given.items() if key != "cluster"}
        return _Given(ClusterSpec(given["cluster"]), **rest)
    return _Given(ClusterSpec(given))


def _choose_job(spec: ClusterSpec, job_name: str | None) -> str:
    if job_name is None:
        if len(spec.jobs) != 1:
            raise ValueError(
                f"Server: job_name=None: the cluster has the jobs {', '.join(spec.jobs)}. Say "
                "which one this process is part of."
            )
        return spec.jobs[0]
    check_member(spec, job_name, None, type_field="Server: job_name")
    if job_name == "chief":
        raise ValueError(
            "Server: job_name='chief': the chief is the coordinator. It creates "
            "dx.ParameterServerStrategy(resolver), which makes it a part of the cluster; only "
            "workers and parameter servers are Servers."
        )
    return job_name


def _choose_index(spec: ClusterSpec, job: str, index: int | None) -> int:
    if index is None:
        indices = spec.task_indices(job)
        if len(indices) != 1:
            raise ValueError(
                f"Server: task_index=None: the job {job!r} has {len(indices)} tasks. Say which "
                "one this process is."
            )
        return indices[0]
    index = parse_task_index(index, "Server: task_index")
    check_member(spec, job, index, id_field="Server: task_index")
    return index


def _get_remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _limit_wait(deadline: float | None) -> float:
    remaining = _get_remaining(deadline)
    return REMIND_SECONDS if remaining is None else min(REMIND_SECONDS, remaining)

"""The connection of this process to Ray, and the node that was started for it, if any."""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distribax.cluster.ray import cluster_token
from distribax.cluster.ray.cluster_token import import_ray
from distribax.cluster.ray.node import ClusterJoinError, RayNode
from distribax.cluster.ray.node_main import NodeSettings
from distribax.cluster.spec.address import parse_address
from distribax.cluster.spec.host_address import is_loopback

_logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_current: RaySession | None = None
"""The connection of this process; Ray allows one for each process."""


class RaySession:
    """A connection to Ray that engines share; it ends when the last of them releases it.

    Args:
        node: The node that was started for it; None if the cluster was running before.
        owned: Whether the connection was made here, and not by the program itself.
    """

    def __init__(self, node: RayNode | None, *, owned: bool) -> None:
        self._node = node
        self._owned = owned
        self._users = 0
        self._lock = threading.Lock()
        global _current
        _current = self
        # Ray registers its own function for the end of the program earlier, so that it runs later.
        atexit.register(self.end)

    @property
    def folder(self) -> Path | None:
        """The folder of the node that was started here; it is removed when the node ends."""
        return None if self._node is None else self._node.folder

    def acquire(self) -> RaySession:
        """Notes that one more engine uses the connection, and returns the connection."""
        with self._lock:
            self._users += 1
        return self

    def release(self, namespace: str) -> None:
        """Ends the actors of one engine, and the connection if no other engine uses it."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if not last or not self._owned:
            _kill_actors(namespace)
        if last:
            self.end()

    def end(self) -> None:
        """Ends the connection, if it was made here, and the node; a second call does nothing."""
        global _current
        atexit.unregister(self.end)
        if _current is not self:
            return
        _current = None
        if self._owned:
            import_ray().shutdown()
            if self._node is not None:
                cluster_token.reload_token()
        if self._node is not None:
            self._node.close(end_cluster=True)


def get_current(address: str | None = None) -> RaySession | None:
    """Returns the connection of this process, even if the program has made it itself.

    Raises:
        RuntimeError: The process is connected to a cluster at another address.
    """
    ray = import_ray()
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise RuntimeError(
            f"address={address!r}: this process is connected to the Ray cluster at {here} already, "
            "and there can be one at a time. Close what uses it, or call ray.shutdown()."
        )
    return _current or RaySession(None, owned=False)


def start(settings: NodeSettings) -> RaySession:
    """Starts a node on this machine and connects this process to it.

    Raises:
        ClusterJoinError: The node could not become part of its cluster.
        RuntimeError: This process is connected to a Ray cluster already.
    """
    ray = import_ray()
    if ray.is_initialized():
        raise RuntimeError(
            "This process is connected to a Ray cluster already, and there can be one at a time. "
            "Close what uses it, or call ray.shutdown(), before a strategy starts its own."
        )
    node = RayNode(settings)
    try:
        address = node.wait_until_up()
        assert address is not None
        _connect_ray(address, settings.token, node)
    except BaseException:
        node.close()
        raise
    return RaySession(node, owned=True)


def connect(address: str, timeout: float) -> RaySession:
    """Connects this process to a cluster that is already running.

    Raises:
        ClusterJoinError: The cluster does not answer in time, or has another token.
        ValueError: The address is that of Ray's client server.
    """
    if "://" in address:
        raise ValueError(
            f"address={address!r}: the coordinator must be on a machine of the Ray cluster, as it "
            "talks to the parameter servers directly. Give 'host:port' of the head, or 'auto'."
        )
    errors = import_ray().exceptions
    cluster_token.reload_token()
    try:
        if address != "auto":
            _await_cluster(address, timeout)
        _connect_ray(address, None, None)
    except errors.AuthenticationError as error:
        raise ClusterJoinError(
            f"address={address!r}: the Ray cluster has another token than this process. Give it "
            f"in the environment variables RAY_AUTH_MODE=token and {cluster_token.TOKEN_VARIABLE}."
        ) from error
    except (ConnectionError, errors.RayError) as error:
        raise ClusterJoinError(f"address={address!r}: no connection to Ray: {error}") from error
    _logger.info("connected to the Ray cluster at %s", address)
    return RaySession(None, owned=True)


def get_resources() -> dict[str, float]:
    """Returns the sums of the resources of the cluster's live nodes."""
    found: dict[str, float] = import_ray().cluster_resources()
    return found


def _connect_ray(address: str, token: str | None, node: RayNode | None) -> None:
    ray = import_ray()
    with (
        cluster_token.use_token(token),
        _keep_process_state(),
        _silence_deaths(),
        _keep_loopback(address),
    ):
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="error",
            # There may be several nodes on this machine: this one was started for this process.
            _temp_dir=None if node is None else str(node.ray_folder),
        )


@contextlib.contextmanager
def _keep_process_state() -> Iterator[None]:
    """Restores what Ray changes in a process: environment variables and the handler of SIGTERM.

    The node ends with the program, whatever SIGTERM does to the program.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with cluster_token.keep_environment():
            yield
    finally:
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _silence_deaths() -> Iterator[None]:
    """Keeps Ray from printing a paragraph for each process that dies.

    The coordinator reports the death and what it does about it. Ray's own message is in its logs.
    """
    from ray._private import worker

    listen = worker.listen_error_messages
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = listen


@contextlib.contextmanager
def _keep_loopback(address: str) -> Iterator[None]:
    """Keeps Ray from replacing a loopback address by the machine's address in the network.

    Ray leaves it alone only where it assumes that clusters of several machines are impossible.
    """
    from ray._private import ray_constants

    host = address.rpartition(":")[0].strip("[]")
    before = ray_constants.ENABLE_RAY_CLUSTER
    if host == "localhost" or (host[:1].isdigit() and is_loopback(host)):
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _await_cluster(address: str, seconds: float) -> None:
    """Waits until a process listens at the address, and lets Ray check the token."""
    from ray import _raylet

    parsed = parse_address(address, "address")
    if parsed.port is None:
        raise ValueError(f"address={address!r}: the port is missing. Write 'host:port'.")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((parsed.host, parsed.port), timeout=1.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterJoinError(
                    f"address={address!r}: no Ray cluster answers there within {seconds:g} s "
                    f"({error}). Start it, for example with `ray start --head`, or check that the "
                    "address can be reached from here."
                ) from error
            time.sleep(_POLL_SECONDS)
        else:
            break
    # `ray.init` would retry a wrong token for a long time.
    _raylet.GcsClient(address=address)


def _kill_actors(namespace: str) -> None:
    ray = import_ray()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace:
            with contextlib.suppress(ValueError):  # It has ended in the meantime.
                ray.kill(ray.get_actor(actor["name"], namespace=namespace), no_restart=True)

"""The connection of this process to Ray, and the node that was started for it, if any."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from distribax.cluster.ray import cluster_token
from distribax.cluster.ray.cluster_token import import_ray
from distribax.cluster.ray.left_sockets import note_ports
from distribax.cluster.ray.node import ClusterJoinError, RayNode
from distribax.cluster.ray.node_main import NodeSettings
from distribax.cluster.ray.ray_shutdown import prepare_shutdown, shut_down_ray
from distribax.cluster.ray.task_nodes import REJOIN_SECONDS
from distribax.cluster.spec.address import parse_full_address
from distribax.cluster.spec.host_address import is_loopback
from distribax.errors import DistribaxError

if TYPE_CHECKING:
    import ray

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
_CALL_SECONDS: Final = 5.0
"""How long Ray is not shut down because of calls that have not returned."""
_MAX_ATTEMPTS: Final = 3
"""How often it is tried to start Ray again after it has failed."""

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
        self._is_ending = False
        # How often Ray was started again, and why it could not be.
        self.epoch: int | None = 0
        self.failure: str | None = None
        # A program may close its strategy in a handler of what is logged meanwhile.
        self._changing = threading.RLock()
        # Threads that call Ray while it is started again must not start a cluster of their own.
        self._automatic_start = _set_automatic_start(False) if owned else None
        global _current
        _current = self
        # Ray registers its own function for the end of the program earlier, so that it runs later.
        atexit.register(self.end)
        if node is not None:
            threading.Thread(
                target=self._watch_node, name="distribax-ray-session", daemon=True
            ).start()

    @property
    def snapshot_folder(self) -> Path | None:
        """Where servers of this machine save their state; None if no node was started here."""
        return None if self._node is None else self._node.snapshot_folder

    def _watch_node(self) -> None:
        """Starts Ray again whenever it fails on this machine, until the session ends."""
        try:
            while self._node is not None and not self._is_ending:
                try:
                    self._node.wait_until_ended()
                    return  # The cluster has ended.
                except ClusterJoinError as error:
                    with self._changing:
                        if not self._is_ending and not self._start_again(error):
                            return
        except BaseException as error:
            # Otherwise everybody would wait for ever until Ray is there again.
            self.failure = f"Ray has failed, and could not be started again: {error!r}"
            raise

    def _start_again(self, trouble: ClusterJoinError) -> bool:
        """Replaces the node and the connection; returns whether that was possible.

        Without this, Ray would end the program a minute later, without Python's exit functions.
        """
        assert self._node is not None and self.epoch is not None
        epoch, self.epoch = self.epoch, None
        _logger.warning("%s. Ray is started again; servers go on from their snapshots.", trouble)
        settings = self._node.settings
        if not settings.is_head:
            settings = dataclasses.replace(settings, timeout=REJOIN_SECONDS)
        _shut_down_ray(self._node)
        self._node.close()
        for attempt in range(_MAX_ATTEMPTS):
            if self._is_ending:
                return False
            try:
                self._node = _start_node(settings)
            except Exception as error:
                _logger.warning("Ray could not be started, attempt %d: %s", attempt + 1, error)
            else:
                self.epoch = epoch + 1
                _logger.warning("Ray has been started again.")
                return True
        self.failure = f"{trouble}; Ray could not be started again"
        _logger.error("%s.", self.failure)
        return False

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
        # While Ray is started again, they are gone.
        if self.epoch is not None and not (last and self._owned):
            _kill_actors(namespace)
        if last:
            self.end()

    def end(self) -> None:
        """Ends the connection, if it was made here, and the node; a second call does nothing."""
        atexit.unregister(self.end)
        self._is_ending = True
        with self._changing:
            self._end()

    def _end(self) -> None:
        global _current
        if _current is not self:
            return
        _current = None
        if self._owned:
            _shut_down_ray(self._node, end_cluster=True)
            if self._node is not None:
                cluster_token.reload_token()
        if self._node is not None:
            self._node.close(end_cluster=True)
            shutil.rmtree(self._node.snapshot_folder, ignore_errors=True)
        if self._automatic_start is not None:
            _set_automatic_start(self._automatic_start)


class RayStoppedError(DistribaxError, RuntimeError):
    """Ray was shut down, perhaps by another thread while a call waited for it."""


_calls = threading.Condition()
_num_calls = 0


@contextlib.contextmanager
def guard_calls() -> Iterator[None]:
    """Keeps calls of Ray from what it does to them when it is shut down: put all of them inside.

    Ray starts another cluster where it is called and there is none. Threads that wait for it when
    another one shuts it down are ended, or never return, as it frees what they use. So it is not
    shut down before they have left the block, or some seconds have passed; wait for answers of
    actors elsewhere (`ask_actor`).

    Raises:
        RayStoppedError: Ray was shut down, before or while a call waited for it.
    """
    global _num_calls
    with _calls:
        _num_calls += 1
    try:
        if not import_ray().is_initialized():
            raise RayStoppedError(get_failure() or "Ray has been shut down in this process.")
        yield
    except SystemExit:
        raise _make_stopped_error() from None
    finally:
        with _calls:
            _num_calls -= 1
            _calls.notify_all()


def _make_stopped_error() -> RayStoppedError:
    return RayStoppedError(
        "Ray was shut down while a call waited for it: it failed and is started again, or the "
        "strategy was closed. Call again."
    )


@dataclasses.dataclass(frozen=True)
class PendingAnswer(Generic[T]):
    """What an actor will answer; unlike `ray.get`, waiting for it survives the end of Ray."""

    _future: concurrent.futures.Future[T]
    _epoch: int | None

    def wait(self, seconds: float) -> T:
        """Returns the answer when it is there.

        Raises:
            TimeoutError: It was not there in time.
            RayStoppedError: Ray was shut down.
            Exception: Whatever else the call has ended with.
        """
        deadline = time.monotonic() + seconds
        while not self._future.done():
            remaining = deadline - time.monotonic()
            if self._epoch != get_epoch() or not import_ray().is_initialized():
                raise _make_stopped_error()
            if remaining <= 0:
                raise TimeoutError(f"there was no answer within {seconds:g} s")
            concurrent.futures.wait([self._future], timeout=min(_POLL_SECONDS, remaining))
        return self._future.result()


def ask_actor(question: Callable[[], ray.ObjectRef[T]], epoch: int | None) -> PendingAnswer[T]:
    """Calls a method of an actor, and does not wait for the answer.

    Args:
        question: The call, `actor.method.remote` for example.
        epoch: What `get_epoch` was when the actor was made.

    Raises:
        RayStoppedError: Ray was shut down, or started again since then.
    """
    with guard_calls():
        if epoch != get_epoch():
            raise _make_stopped_error()
        return PendingAnswer(question().future(), epoch)


def get_epoch() -> int | None:
    """Returns how often Ray was started again in this process; None while it is.

    What was made before is of no use then: each actor has to be made again.
    """
    return 0 if _current is None else _current.epoch


def get_failure() -> str | None:
    """Returns why Ray could not be started again, if that was tried."""
    return None if _current is None else _current.failure


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
    return RaySession(_start_node(settings), owned=True)


def _start_node(settings: NodeSettings) -> RayNode:
    """Starts a node and connects this process to it; if that fails, nothing is left of it."""
    node = RayNode(settings)
    try:
        address = node.wait_until_up()
        assert address is not None
        _connect_ray(address, settings.token, node)
    except BaseException:
        _shut_down_ray(node)
        node.close()
        raise
    return node


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
    """Returns the sums of the resources of the cluster's live nodes; none without Ray."""
    found: dict[str, float] = {}
    with contextlib.suppress(RayStoppedError), guard_calls():
        found = import_ray().cluster_resources()
    return found


def _shut_down_ray(node: RayNode | None, *, end_cluster: bool = False) -> None:
    """Ends the connection, and if that is not possible otherwise the node."""
    with _calls:
        # Without its processes they may take a minute; Ray then ends their threads.
        _calls.wait_for(lambda: not _num_calls, _CALL_SECONDS)
    if node is None:
        shut_down_ray(lambda: "the node of this machine does not answer", None)
    else:
        shut_down_ray(
            node.describe_processes, functools.partial(node.close, end_cluster=end_cluster)
        )


def _connect_ray(address: str, token: str | None, node: RayNode | None) -> None:
    ray = import_ray()
    from ray._private import ray_constants, worker

    host = address.rpartition(":")[0].strip("[]")
    is_local = host == "localhost" or (host[:1].isdigit() and is_loopback(host))
    with (
        cluster_token.use_token(token),
        _keep_process_state(),
        # Ray prints a paragraph for each process that dies, and has it in its logs. The coordinator
        # reports the death and what it does about it.
        _set_for_a_while(worker, "listen_error_messages", lambda *_: None),
        # Ray replaces a loopback address by the machine's address in the network, except where it
        # assumes that clusters of several machines are impossible.
        _set_for_a_while(
            ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER and not is_local
        ),
    ):
        prepare_shutdown()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="error",
            # There may be several nodes on this machine: this one was started for this process.
            _temp_dir=None if node is None else str(node.ray_folder),
        )
    note_ports()


def _set_automatic_start(wanted: bool) -> bool:
    """Sets whether Ray starts a cluster when it is called without one; returns what was set."""
    from ray._private import auto_init_hook

    # Ray reads its environment variable for this only when it is imported.
    before, auto_init_hook.enable_auto_connect = auto_init_hook.enable_auto_connect, wanted
    return bool(before)


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
def _set_for_a_while(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute of one of Ray's modules in the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _await_cluster(address: str, seconds: float) -> None:
    """Waits until a process listens at the address, and lets Ray check the token."""
    from ray import _raylet

    parsed = parse_full_address(address, "address")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((parsed.host, parsed.port or 0), timeout=1.0).close()
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
    # Actors end with Ray, which may have ended, or may do so in the meantime.
    with contextlib.suppress(RayStoppedError, ray.exceptions.RayError), guard_calls():
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == namespace:
                with contextlib.suppress(ValueError):  # It has ended in the meantime.
                    ray.kill(ray.get_actor(actor["name"], namespace=namespace), no_restart=True)

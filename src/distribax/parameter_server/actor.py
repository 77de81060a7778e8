"""The Ray actors that hold the parameter servers: started, found, watched and ended here."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.ray import node_main, ray_session
from distribax.cluster.ray.node import NODE_FOLDER_VARIABLE
from distribax.cluster.ray.ray_session import PendingAnswer, RayStoppedError, ask_actor
from distribax.errors import ParameterServerUnreachableError
from distribax.parameter_server import (
    Endpoint,
    ParameterClient,
    ParameterServer,
)
from distribax.parameter_server.settings import ServerSettings
from distribax.topology.host_memory import keep_freed_memory

_logger = logging.getLogger(__name__)

# How often the servers are asked for a sign of life.
_PING_SECONDS = 2.0
_STATUS_SECONDS = 0.05
# How much nicer than workers a server is. A worker that has pushed soon waits for the answer, and
# leaves its core to the server; with the same niceness, the server would interrupt a worker that
# computes, and cost it its caches.
_NICENESS = 10
# How long a server may take to start.
_START_SECONDS = read_seconds("DISTRIBAX_SERVER_START_SECONDS", 60.0)
# How long a worker waits for a server that does not answer, or is being restarted; then its
# functions go to others.
_ANSWER_SECONDS = read_seconds("DISTRIBAX_SERVER_ANSWER_SECONDS", 60.0)
_RESTART_POLL_SECONDS = 0.2
# How long the coordinator waits for it, as there is nobody else.
_LOST_SECONDS = read_seconds("DISTRIBAX_SERVER_LOST_SECONDS", 300.0)
_LOCATE_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_END_SECONDS = 5.0


class ServerActor:
    """One parameter server; Ray restarts it in place when its process dies."""

    def __init__(self, settings: ServerSettings) -> None:
        import ray

        keep_freed_memory()
        os.nice(_NICENESS)  # Of this thread, and of those that it starts.
        # It waits for each update: to have another thread compute it would only cost time.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        self._settings = settings
        self._server = ParameterServer(
            settings.index,
            host=settings.host or ray.util.get_node_ip_address(),
            token=settings.token,
            snapshot_dir=settings.snapshot_dir,
            snapshot_interval=settings.snapshot_interval,
        )
        self._endpoint = self._server.start()
        node_folder = os.environ.get(NODE_FOLDER_VARIABLE)
        if node_folder is not None:
            threading.Thread(
                target=self._save_with_node,
                args=(Path(node_folder),),
                name="distribax-server-end",
                daemon=True,
            ).start()

    def _save_with_node(self, folder: Path) -> None:
        """Saves and ends this process when its node leaves a cluster that goes on."""
        (folder / f"{node_main.SERVING_PREFIX}{os.getpid()}").touch()
        while not (folder / node_main.LEAVING_NAME).exists():
            time.sleep(_LOOK_SECONDS)
        try:
            self._server.save_and_stop()
        finally:
            os._exit(0)

    def endpoint(self) -> Endpoint:
        """Returns where the server listens."""
        return self._endpoint

    def status(self) -> dict[str, Any]:
        """Returns what the server holds and has done; the answer is a sign of life."""
        return {"pid": os.getpid(), **self._server.status()}

    def snapshot(self) -> str:
        """Writes a snapshot now, and returns its path."""
        return str(self._server.snapshot())

    def end(self) -> None:
        """Ends the server, and removes its snapshots and the folders that are empty without."""
        self._server.close()
        folder = self._settings.snapshot_dir
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                for above in itertools.islice(folder.parents, 3):
                    above.rmdir()


def connect_to_servers(
    num_servers: int,
    namespace: str,
    token: str,
    client_id: str,
    worker: int | None = None,
    *,
    is_coordinator: bool = False,
) -> ParameterClient:
    """Returns this process's client of the servers, which finds them again after a restart.

    Args:
        num_servers: How many servers there are.
        namespace: The Ray namespace of their actors.
        token: The secret that servers ask for.
        client_id: A name that no other client has.
        worker: The worker whose share of synchronous updates the client computes, if there are
            any.
        is_coordinator: Whether this process is the coordinator.
    """

    def locate(index: int) -> Endpoint:
        import ray

        if (epoch := ray_session.get_epoch()) is None:
            raise ConnectionError(f"parameter server {index}: Ray is being started again")
        # The client asks again until its own patience ends: servers take time to restart.
        try:
            with ray_session.guard_calls():
                actor = ray.get_actor(f"server-{index}", namespace=namespace)
            answer: PendingAnswer[Endpoint] = ask_actor(actor.endpoint.remote, epoch)
            return answer.wait(_LOCATE_SECONDS)
        except (ray.exceptions.RayError, ValueError, TimeoutError, RayStoppedError) as error:
            raise ConnectionError(f"parameter server {index} cannot be reached: {error}") from error

    return ParameterClient(
        num_servers,
        locate,
        client_id=client_id,
        token=token.encode(),
        timeout=max(_ANSWER_SECONDS, _LOST_SECONDS) if is_coordinator else _ANSWER_SECONDS,
        worker=worker,
    )


@dataclass
class ServerHealth:
    """What is known of one server.

    Attributes:
        index: The server's index.
        boot: The name of its process, as of its last answer.
        starting: Whether its process has not answered yet.
        restarts: How often its process was started again.
        updates: How many optimizer updates it had applied when it last answered.
        counts: How many changes of each kind it had made then, "assign_add" for example.
        answered: When it last answered, in seconds of `time.monotonic()`.
        lost: What the last restart has lost, in a sentence; empty if there was none.
        lost_counts: How many changes of each kind all restarts have lost, as far as is known.
        status: What it said last.
    """

    index: int
    boot: str = ""
    starting: bool = True
    restarts: int = 0
    updates: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    answered: float = field(default_factory=time.monotonic)
    lost: str = ""
    lost_counts: dict[str, int] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)


class ServerGroup:
    """The servers of a strategy: starts them, has silent ones restarted, and ends them.

    Ray notices a process that has ended. One that hangs or is stopped is ended here when it has
    not answered for a while, and Ray starts it again.

    Args:
        settings: The settings of each server.
        options: The Ray options for the actor of each server.
    """

    def __init__(
        self, settings: Sequence[ServerSettings], options: Sequence[Mapping[str, Any]]
    ) -> None:
        self._settings = tuple(settings)
        self._options = tuple(options)
        self._epoch = ray_session.get_epoch()
        self._actors = self._make_actors()
        self._health = [ServerHealth(index) for index in range(len(self._actors))]
        self._pending: list[PendingAnswer[dict[str, Any]] | None] = [None] * len(self._actors)
        self._timeout = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distribax-servers", daemon=True)

    def _make_actors(self) -> list[Any]:
        import ray

        actor = ray.remote(ServerActor)
        with ray_session.guard_calls():
            return [
                # An attempt that has failed may have made some of them.
                actor.options(**each, get_if_exists=True).remote(own)
                for own, each in zip(self._settings, self._options, strict=True)
            ]

    def watch(self, timeout: float) -> None:
        """Begins to look after the servers.

        Args:
            timeout: After how many seconds without an answer a server is restarted.
        """
        self._timeout = timeout
        self._thread.start()

    @property
    def health(self) -> list[ServerHealth]:
        """What is known of each server, as of its last answer."""
        return list(self._health)

    def snapshot(self) -> list[str]:
        """Has every server save its state now, and returns the paths.

        Raises:
            ParameterServerUnreachableError: A server has not answered in time.
            OSError: A server cannot write its snapshot.
            RayStoppedError: Ray was shut down, and is not started again.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            self._await_ray(deadline)
            epoch = self._epoch
            try:
                pending: list[PendingAnswer[str]] = [
                    ask_actor(actor.snapshot.remote, epoch) for actor in self._actors
                ]
                return [
                    self._await_snapshot(index, answer, epoch, deadline)
                    for index, answer in enumerate(pending)
                ]
            except RayStoppedError:
                if epoch == ray_session.get_epoch() or time.monotonic() > deadline:
                    raise

    def _await_snapshot(
        self, index: int, answer: PendingAnswer[str], epoch: int | None, deadline: float
    ) -> str:
        import ray

        while True:
            try:
                return answer.wait(max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                # What the server says, without the lines that Ray puts around it.
                raise error.cause from None
            except (ray.exceptions.ActorUnavailableError, TimeoutError) as error:
                # It is being restarted.
                if time.monotonic() > deadline:
                    raise ParameterServerUnreachableError(
                        index, "", _ANSWER_SECONDS, str(error)
                    ) from error
                time.sleep(_RESTART_POLL_SECONDS)
                answer = ask_actor(self._actors[index].snapshot.remote, epoch)

    def _await_ray(self, deadline: float) -> None:
        """Waits while Ray is started again, until there are servers again."""
        while (
            self._epoch != ray_session.get_epoch()
            and ray_session.get_failure() is None
            and time.monotonic() < deadline
        ):
            time.sleep(_RESTART_POLL_SECONDS)

    def close(self, *, keep_snapshots: bool) -> None:
        """Ends the watch, and has the servers remove their snapshots unless they are kept."""
        import ray

        self._closed.set()
        # A handler of messages may close the strategy in the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        if not keep_snapshots:
            deadline = time.monotonic() + _END_SECONDS
            # They may be gone, or Ray may be started again just now.
            gone = (ray.exceptions.RayError, RayStoppedError, TimeoutError)
            pending: list[PendingAnswer[None]] = []
            for actor in self._actors:
                with contextlib.suppress(*gone):
                    pending.append(ask_actor(actor.end.remote, self._epoch))
            for answer in pending:
                with contextlib.suppress(*gone):
                    answer.wait(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._closed.wait(_PING_SECONDS):
            epoch = ray_session.get_epoch()
            if epoch is None:
                continue
            if epoch != self._epoch:
                try:
                    self._actors = self._make_actors()
                except Exception:  # Ray has failed once more, and is started again.
                    _logger.debug("parameter servers could not be started", exc_info=True)
                    continue
                for index in range(len(self._actors)):
                    self._await_start(index)
                self._epoch = epoch
            for index in range(len(self._actors)):
                self._look_after(index)

    def _look_after(self, index: int) -> None:
        import ray

        health = self._health[index]
        try:
            if (answer := self._pending[index]) is None:
                answer = ask_actor(self._actors[index].status.remote, self._epoch)
                self._pending[index] = answer
            with contextlib.suppress(TimeoutError):
                _take_in(health, answer.wait(_STATUS_SECONDS))
                self._pending[index] = None
                return
        except RayStoppedError:
            self._await_start(index)
            return
        except Exception:
            # The process has ended, and Ray is starting it again; or Ray itself has ended, which
            # it says in many ways.
            if not health.starting:
                _logger.warning("Parameter server %d has died; Ray restarts it.", index)
            self._await_start(index)
            return
        # A process that has not answered yet is still starting: Python, JAX and its snapshot.
        patience = max(self._timeout, _START_SECONDS) if health.starting else self._timeout
        if time.monotonic() - health.answered > patience and not self._closed.is_set():
            _logger.warning(
                "Parameter server %d has not answered for %.0f s and is restarted.", index, patience
            )
            self._await_start(index)
            # Ray may have ended meanwhile.
            with contextlib.suppress(Exception), ray_session.guard_calls():
                ray.kill(self._actors[index], no_restart=False)

    def _await_start(self, index: int) -> None:
        self._pending[index] = None
        health = self._health[index]
        health.starting, health.answered = True, time.monotonic()


def _take_in(health: ServerHealth, status: dict[str, Any]) -> None:
    """Notes what a server has answered, and tells the user what a restart has lost."""
    error = status.get("snapshot_error")
    if error and error != health.status.get("snapshot_error"):
        _logger.warning(
            "Parameter server %d cannot save its snapshot, so its state would be lost if it died: "
            "%s. Look at snapshot_dir, which is a folder of the server's machine.",
            health.index,
            error,
        )
    boot = status["boot"]
    if health.boot and boot != health.boot:
        health.restarts += 1
        health.lost = _explain_loss(health, status)
        _logger.warning("%s", health.lost)
    health.boot, health.updates = boot, int(status["updates"])
    health.counts = dict(status["counts"])
    health.answered, health.status, health.starting = time.monotonic(), status, False


def _explain_loss(health: ServerHealth, status: Mapping[str, Any]) -> str:
    if not status.get("restored"):
        return (
            f"parameter server {health.index} died and was restarted with nothing, as there is no "
            "snapshot: its variables are gone. Restore them with dx.Checkpoint(...).restore(...)."
        )
    exact, known = status["lost_counts"], Counter(health.lost_counts)
    if exact is None:
        # Not the counts of now: there may have been changes since its start.
        lost = Counter(health.counts) - Counter(status["restored_counts"])
        word, note = "at least ", "what came after its last answer is not known"
    else:
        lost = Counter(exact) - known
        word, note = "", "what it had not acknowledged is sent again"
    health.lost_counts = dict(known + lost)
    named = ", ".join(f"{count} x {kind}" for kind, count in sorted(lost.items()))
    return (
        f"parameter server {health.index} died and was restarted from its snapshot "
        f"{status['restored']}, which holds {sum(status['restored_counts'].values())} changes. "
        f"Lost are {word}{named or 'none'} ({note})."
    )

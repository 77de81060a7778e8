"""The Ray actor that holds one parameter server, and the watch over all of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from distribax.parameter_server import Endpoint, ParameterServer, keep_freed_memory
from distribax.parameter_server.settings import ServerSettings

logger = logging.getLogger("distribax")

# How often the servers are asked whether they are there.
_PING_SECONDS = 2.0
# How much nicer than workers a server is. A worker that has pushed soon waits for the answer, and
# leaves its core to the server; with the same niceness, the server would interrupt a worker that
# computes, and cost it its caches.
_NICENESS = 10
# How long a server may take to start.
_START_SECONDS = 60.0


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
            record_history=settings.record_history,
        )
        self._endpoint = self._server.start()

    def endpoint(self) -> Endpoint:
        """Returns where the server listens."""
        return self._endpoint

    def status(self) -> dict[str, Any]:
        """Returns what the server holds and has done; answering it shows that it is alive."""
        return {"pid": os.getpid(), **self._server.status()}

    def snapshot(self) -> str:
        """Writes a snapshot now, and returns where it is."""
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


def take_snapshots(actors: Sequence[Any], timeout: float) -> list[str]:
    """Has every server save its state now; returns where."""
    import ray

    pending = [actor.snapshot.remote() for actor in actors]
    try:
        paths: list[str] = ray.get(pending, timeout=timeout)
    except ray.exceptions.RayTaskError as error:
        # What the server says, without the lines of Ray's own around it.
        raise error.cause from None
    return paths


@dataclass
class ServerHealth:
    """What is known of one server."""

    index: int
    boot: str = ""
    starting: bool = True
    restarts: int = 0
    updates: int = 0
    answered: float = field(default_factory=time.monotonic)
    lost: str = ""
    status: dict[str, Any] = field(default_factory=dict)


class ServerWatch:
    """Asks the servers in turn whether they are there, and has the silent ones restarted.

    Ray notices a process that has ended by itself. One that is stopped, or hangs, is ended here
    when it has not answered for `timeout` seconds; Ray then starts it again.
    """

    def __init__(self, actors: list[Any], timeout: float) -> None:
        self._actors = actors
        self._timeout = timeout
        self._health = [ServerHealth(index) for index in range(len(actors))]
        self._pending: list[Any] = [None] * len(actors)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distribax-servers", daemon=True)
        self._thread.start()

    @property
    def health(self) -> list[ServerHealth]:
        """What is known of each server, as of its last answer."""
        return list(self._health)

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._ended.wait(_PING_SECONDS):
            for index in range(len(self._actors)):
                self._look_after(index)

    def _look_after(self, index: int) -> None:
        import ray

        health = self._health[index]
        if self._pending[index] is None:
            self._pending[index] = self._actors[index].status.remote()
        try:
            ready, _ = ray.wait([self._pending[index]], timeout=0.05)
            if ready:
                status = ray.get(self._pending[index])
                self._pending[index] = None
                self._note(health, status)
                return
        except ray.exceptions.RayError:
            # The process has ended; Ray is starting it again.
            self._pending[index] = None
            health.starting, health.answered = True, time.monotonic()
            return
        # A process that has not answered yet is still starting: Python, JAX and its snapshot.
        patience = max(self._timeout, _START_SECONDS) if health.starting else self._timeout
        if time.monotonic() - health.answered > patience and not self._ended.is_set():
            logger.warning(
                "parameter server %d has not answered for %.0f s; it is ended and started again.",
                index,
                patience,
            )
            self._pending[index] = None
            health.starting, health.answered = True, time.monotonic()
            ray.kill(self._actors[index], no_restart=False)

    def _note(self, health: ServerHealth, status: dict[str, Any]) -> None:
        error = status.get("snapshot_error")
        if error and error != health.status.get("snapshot_error"):
            logger.warning(
                "parameter server %d cannot save its snapshot, so that its state would be lost if "
                "it died: %s. Look at snapshot_dir, which is a folder of the server's machine.",
                health.index,
                error,
            )
        boot = status["boot"]
        if health.boot and boot != health.boot:
            health.restarts += 1
            kept = int(status["updates"])
            if status.get("restored"):
                lost = max(health.updates - kept, 0)
                health.lost = (
                    f"parameter server {health.index} died and was restarted from its snapshot "
                    f"{status['restored']}: it had applied at least {health.updates} updates, "
                    f"{kept} are in the snapshot, so at least {lost} are lost (at most those since "
                    "the snapshot was taken)."
                )
            else:
                health.lost = (
                    f"parameter server {health.index} died and was restarted with nothing, as "
                    "there is no snapshot: its variables are gone. Restore them with "
                    "dx.Checkpoint(...).restore(...)."
                )
            logger.warning("%s", health.lost)
        health.boot, health.updates = boot, int(status["updates"])
        health.answered, health.status, health.starting = time.monotonic(), status, False

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
from pathlib import Path
from typing import Any

from distribax.cluster.resolver import ClusterResolver
from distribax.parameters import Endpoint, ParameterServer, keep_freed_memory

logger = logging.getLogger("distribax")

# How often the servers are asked whether they are there.
_PING_SECONDS = 2.0
# How long a server may take to start.
_START_SECONDS = 60.0


@dataclass(frozen=True)
class ServerSettings:
    """What a parameter server needs to start, and to start again after its death."""

    index: int
    host: str | None
    token: bytes
    strategy: str
    folder: str
    snapshot_interval: float | None
    record_history: bool = False

    @property
    def snapshot_dir(self) -> Path | None:
        """The server's own folder for snapshots, on its machine; None if it takes none."""
        if self.snapshot_interval is None:
            return None
        # The machine of the server may have its folder elsewhere, named by a variable.
        folder = Path(os.path.expandvars(self.folder))
        return folder / f"snapshots-{self.strategy[:8]}" / f"server-{self.index}"


def check_cluster(resolver: Any, num_workers: Any, num_ps: Any, address: Any) -> None:
    """Raises if a `ParameterServerStrategy` cannot have such a cluster."""
    for name, count in (("num_workers", num_workers), ("num_ps", num_ps)):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"ParameterServerStrategy: {name}={count!r}. Expected a number of at least 1."
            )
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"ParameterServerStrategy: cluster_resolver={resolver!r}. Expected a resolver, for "
            "example dx.cluster_resolver.TFConfigClusterResolver(), or None. The number of workers "
            "and servers on this machine is given by name: num_workers=2, num_ps=1."
        )
    if address is not None and not isinstance(address, str):
        raise TypeError(
            f"ParameterServerStrategy: address={address!r}. Expected the address of a Ray cluster, "
            "such as 'ray-head:6379' or 'auto'."
        )


def check_settings(
    partitioner: Any,
    snapshot_interval: Any,
    snapshot_dir: Any,
    server_timeout: Any,
    synchronous: Any,
) -> None:
    """Raises if these arguments of a `ParameterServerStrategy` cannot be, before it starts."""
    # A class is callable too; it was meant to be made an instance of.
    if partitioner is not None and (isinstance(partitioner, type) or not callable(partitioner)):
        raise TypeError(
            f"ParameterServerStrategy: variable_partitioner={partitioner!r} is not a partitioner. "
            "Expected a callable that is given shape and dtype, for example "
            "dx.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)."
        )
    seconds = {"snapshot_interval": snapshot_interval, "server_timeout": server_timeout}
    for name, value in seconds.items():
        if value is None and name == "snapshot_interval":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            or_none = ", or None for no snapshots" if name == "snapshot_interval" else ""
            raise ValueError(
                f"ParameterServerStrategy: {name}={value!r}. Expected a positive number of "
                f"seconds{or_none}."
            )
    if snapshot_dir is not None and not isinstance(snapshot_dir, (str, os.PathLike)):
        raise TypeError(
            f"ParameterServerStrategy: snapshot_dir={snapshot_dir!r}. Expected the path of a "
            "folder, or None for one that is removed at the end."
        )
    if not isinstance(synchronous, bool):
        raise TypeError(
            f"ParameterServerStrategy: synchronous={synchronous!r}. Expected True or False."
        )


class ServerActor:
    """One parameter server; Ray restarts it in place when its process dies."""

    def __init__(self, settings: ServerSettings) -> None:
        import ray

        keep_freed_memory()
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

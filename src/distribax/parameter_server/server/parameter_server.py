"""A parameter server: it keeps parameters, answers pulls, and applies pushes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any, Final

from distribax.cluster.spec.host_address import listen
from distribax.parameter_server.protocol import handshake, sockets
from distribax.parameter_server.protocol.parameter_spec import Endpoint
from distribax.parameter_server.server.request_handler import Host, RequestHandler
from distribax.parameter_server.server.store import Store
from distribax.parameter_server.server.tally import OPTIMIZER_UPDATE
from distribax.parameter_server.shared_memory.arena import can_share
from distribax.parameter_server.snapshots.snapshot_schedule import SnapshotSchedule

_PAUSE_SECONDS: Final = 0.05
_MAX_STRANGERS: Final = 128
"""How many connections may be without a proof; of more, the one that has waited longest is cut."""


class ParameterServer:
    """Keeps parameters and optimizers, and serves them to clients that have the token.

    Args:
        index: The number of this server in the cluster.
        host: The only address to listen on.
        token: The secret of the cluster.
        snapshot_dir: Where to keep snapshots; None for no snapshots.
        snapshot_interval: Seconds between two snapshots; None takes them on demand only.
        shared_memory: Let clients on the same machine read values without asking.

    Example:
        server = ParameterServer(0, token=b"secret")
        endpoint = server.start()
        ...
        server.close()
    """

    def __init__(
        self,
        index: int,
        *,
        host: str = "127.0.0.1",
        token: bytes,
        snapshot_dir: Path | None = None,
        snapshot_interval: float | None = None,
        shared_memory: bool = True,
    ) -> None:
        if not token:
            raise ValueError("token is empty: give all tasks of the cluster the same secret.")
        self.index = index
        self._host = host
        self._token = token
        self._store = Store(shared_memory=shared_memory and can_share())
        self._snapshots = SnapshotSchedule(self._store, snapshot_dir, snapshot_interval, token)
        self._boot = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._connections: dict[socket.socket, threading.Thread] = {}
        # Those that have not proved yet that they have the token, the oldest first.
        self._strangers: dict[socket.socket, None] = {}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._restored_counts: dict[str, int] = {}

    def start(self) -> Endpoint:
        """Restores the newest snapshot if there is one, begins to listen, and returns where."""
        self._snapshots.start()
        self._restored_counts = dict(self._store.tally.counts)
        listener = listen(self._host, 0)
        self._listeners.append(listener)
        machine, unix = sockets.get_machine_id(), ""
        if machine:
            unix = f"distribax-{self._boot}"
            self._listeners.append(sockets.listen_unix(unix))
        for each in self._listeners:
            thread = threading.Thread(
                target=self._accept, args=(each,), name="distribax-parameters-accept", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return Endpoint(self._host, listener.getsockname()[1], unix, self._boot, machine)

    def close(self) -> None:
        """Ends all connections; can be called twice. No snapshot is taken."""
        with self._lock:
            self._closing.set()
            connections = dict(self._connections)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._store.close()
        self._snapshots.close()
        for thread in [*self._threads, *connections.values()]:
            thread.join()

    def snapshot(self) -> Path:
        """Takes a snapshot now and returns its path."""
        return self._snapshots.snapshot()

    def save_and_stop(self) -> None:
        """Takes a last snapshot, if it takes any; nothing is changed any more.

        The process has to end now: anyone who asks it for something waits forever.
        """
        self._store.lock.acquire()
        if self._snapshots.is_on:
            self.snapshot()

    def status(self) -> dict[str, Any]:
        """Returns what the server holds and has done.

        Among it: `boot`, `parameters` and `bytes` (how many), `updates` (applied, those in a
        restored snapshot included), `counts` (all changes by kind, likewise),
        `restored_counts` (those in the restored snapshot), `lost_counts` (those that all restarts
        have lost; None if that is not known), `connections`,
        `rounds` (of synchronous optimizers), `snapshot` and `snapshot_time` (the last), `restored`
        (the snapshot that it began with).
        """
        # Without the store's lock: a ping must not wait for a program that is being compiled.
        store = self._store
        rounds = {
            uid: current.status()
            for uid, current in list(store.rounds.items())
            if (update := store.updates.get(uid)) is not None and update.spec.rounds > 1
        }
        return {
            "index": self.index,
            "boot": self._boot,
            "parameters": len(store.parameters),
            "optimizers": len(store.updates),
            "bytes": sum(parameter.host.nbytes for parameter in list(store.parameters.values())),
            "updates": store.tally.counts[OPTIMIZER_UPDATE],
            "counts": dict(store.tally.counts),
            "lost_counts": dict(store.tally.lost) if store.tally.is_kept else None,
            "restored_counts": self._restored_counts,
            "connections": len(self._connections),
            "rounds": rounds,
            **self._snapshots.status(),
        }

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                # Closed; or too many open files, which may pass.
                self._closing.wait(_PAUSE_SECONDS)
                continue
            thread = threading.Thread(
                target=self._serve,
                args=(connection,),
                name="distribax-parameters-connection",
                daemon=True,
            )
            with self._lock:
                if self._closing.is_set():
                    connection.close()
                    return
                self._connections[connection] = thread
                self._strangers[connection] = None
                if len(self._strangers) > _MAX_STRANGERS:
                    # Its own thread closes it.
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                try:
                    thread.start()
                except RuntimeError:  # Too many threads, which may pass; the client calls again.
                    del self._connections[connection]
                    self._strangers.pop(connection, None)
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            sockets.tune(connection)
            handshake.welcome(connection, self._token)
            with self._lock:
                self._strangers.pop(connection, None)
            host = Host(self._store, self._hello, self.status, self._snapshots.describe_origin)
            RequestHandler(host, connection).run()
        except (OSError, EOFError):
            pass  # The client is gone, or was told that it is refused.
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._strangers.pop(connection, None)
            connection.close()

    def _hello(self, client: str, server: int) -> dict[str, Any]:
        if server != self.index:
            raise ValueError(
                f"this is parameter server {self.index}, not {server}: the address is wrong."
            )
        store = self._store
        with store.lock:
            answer = store.answers.get(client)
            return {
                "boot": self._boot,
                "parameters": len(store.parameters),
                "sequence": answer.sequence if answer else 0,
                "origin": self._snapshots.describe_origin(),
            }

"""A worker's or coordinator's access to the parameters on all servers."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from distribax.parameter_server.client.connection import Connection
from distribax.parameter_server.protocol.operations import Array, Op, encode
from distribax.parameter_server.protocol.parameter_spec import (
    Endpoint,
    OptimizerSpec,
    ParameterSpec,
)
from distribax.parameter_server.protocol.requests import Request
from distribax.parameter_server.protocol.server_status import IncompleteRound, ServerStatus
from distribax.parameter_server.protocol.wire import Message


class VersionedValue(NamedTuple):
    """A parameter's value, and its version: equal versions of a parameter are equal values."""

    version: int
    value: Array


class ParameterClient:
    """Creates, reads and changes parameters on servers; its methods may be called by any thread.

    Args:
        num_servers: How many servers the cluster has.
        locate: Returns where a server is now; called again whenever a connection breaks.
        client_id: The name of this client in messages and histories. A random suffix is added, so
            that a restarted process is another client.
        token: The secret of the cluster.
        timeout: How many seconds a server may take to answer or to come back.
        shared_memory: Use shared memory with servers on the same machine.
        worker: The worker whose share of synchronous updates this client computes; None for a
            client that takes part in none.
    """

    def __init__(
        self,
        num_servers: int,
        locate: Callable[[int], Endpoint],
        *,
        client_id: str,
        token: bytes,
        timeout: float = 60.0,
        shared_memory: bool = True,
        worker: int | None = None,
    ) -> None:
        self.client_id = f"{client_id}/{os.urandom(6).hex()}"
        self._lock = threading.RLock()
        self._cache: dict[str, VersionedValue] = {}
        self._connections = [
            Connection(index, locate, self.client_id, token, timeout, shared_memory, worker)
            for index in range(num_servers)
        ]

    def create(self, spec: ParameterSpec, value: ArrayLike) -> bool:
        """Creates a parameter unless its uid exists; returns whether it did."""
        fields = dataclasses.asdict(spec)
        answer = self._request(spec.server, Request.CREATE, [np.asarray(value)], spec=fields)
        self._connections[spec.server].has_parameters = True
        return bool(answer.header["created"])

    def register_optimizer(self, server: int, spec: OptimizerSpec) -> bool:
        """Registers an optimizer for parameters of a server; returns whether it was new."""
        fields = dataclasses.asdict(spec)
        transformation = np.frombuffer(fields.pop("transformation"), np.uint8)
        answer = self._request(server, Request.REGISTER, [transformation], spec=fields)
        return bool(answer.header["created"])

    def pull(self, specs: Sequence[ParameterSpec]) -> list[Array]:
        """Returns the values of parameters, with this client's pushes so far in them."""
        return [found.value for found in self.pull_versions(specs)]

    def pull_versions(self, specs: Sequence[ParameterSpec]) -> list[VersionedValue]:
        """Like `pull`, with each value's version.

        Only values that have changed since this client's last pull are sent. The values of one
        server belong together: no push is seen in one and not in another. The arrays are read-only
        and never change, so that JAX may use them without a copy.
        """
        by_server: dict[int, list[ParameterSpec]] = {}
        for spec in sorted(specs, key=lambda spec: spec.server):
            by_server.setdefault(spec.server, []).append(spec)
        with self._lock:
            # In the same order in every client: they wait for each other here.
            for server, wanted in by_server.items():
                self._connections[server].prepare_read(wanted)
            asked = {
                server: wanted
                for server, wanted in by_server.items()
                if not self._read_shared(server, wanted)
            }
            if asked:
                self._ask(asked)
            return [self._cache[spec.uid] for spec in specs]

    def _read_shared(self, server: int, specs: Sequence[ParameterSpec]) -> bool:
        """Reads from shared memory; False if the server has to be asked."""
        connection = self._connections[server]
        reader = connection.get_reader(specs)
        if reader is None:
            return False
        found = reader.pull(specs, self._list_versions(specs))
        if found is None:
            return False
        connection.has_parameters = True
        for spec, (version, value) in zip(specs, found, strict=True):
            if value is not None:
                self._cache[spec.uid] = VersionedValue(version, _make_read_only(value))
        return True

    def _ask(self, by_server: Mapping[int, Sequence[ParameterSpec]]) -> None:
        """Fetches what has changed from all servers in parallel."""
        requests = {
            server: Message(
                {
                    "do": Request.PULL,
                    "uids": [spec.uid for spec in specs],
                    "have": self._list_versions(specs),
                }
            )
            for server, specs in by_server.items()
        }
        for server, answer in self._ask_all(requests).items():
            self._connections[server].has_parameters = True
            header = requests[server].header
            self._keep_answer(header["uids"], header["have"], answer)

    def _ask_all(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        """Sends all requests before it receives the answers, so that servers work in parallel."""
        for server, request in requests.items():
            self._connections[server].start(request)
        answers: dict[int, Message] = {}
        errors: list[Exception] = []
        for server, request in requests.items():
            try:
                answers[server] = self._connections[server].finish(request)
            except (RuntimeError, OSError) as error:
                errors.append(error)  # The other answers have to be received all the same.
        if errors:
            raise errors[0]
        return answers

    def _list_versions(self, specs: Sequence[ParameterSpec]) -> list[int]:
        cache = self._cache
        return [cached.version if (cached := cache.get(spec.uid)) else 0 for spec in specs]

    def pull_rows(self, wanted: Sequence[tuple[ParameterSpec, ArrayLike]]) -> list[Array]:
        """Returns some rows of some parameters, with this client's pushes so far in them.

        Only these rows are sent, and each server is asked once.

        Args:
            wanted: The parameters, each with the indices of its rows.
        """
        asked = [(spec, np.asarray(indices)) for spec, indices in wanted]
        found: list[Array | None] = [None] * len(asked)
        places: dict[int, list[int]] = {}
        with self._lock:
            for place, (spec, indices) in enumerate(asked):
                connection = self._connections[spec.server]
                connection.prepare_read([spec])
                reader = connection.get_reader([spec]) if _are_in_range(spec, indices) else None
                found[place] = None if reader is None else reader.pull_rows(spec, indices)
                if found[place] is None:
                    places.setdefault(spec.server, []).append(place)
            requests = {
                server: Message(
                    {"do": Request.ROWS, "uids": [asked[place][0].uid for place in own]},
                    [asked[place][1] for place in own],
                )
                for server, own in places.items()
            }
            for server, answer in self._ask_all(requests).items():
                for place, rows in zip(places[server], answer.arrays, strict=True):
                    found[place] = rows
        return [_make_read_only(rows) for rows in found if rows is not None]

    def push(self, by_server: Mapping[int, Sequence[Op]]) -> None:
        """Sends operations to servers; each server applies its own exactly once, all or none.

        It returns when they are sent. The arrays must not change until the next call, which raises
        what has gone wrong on a server. If that is the case, it sends nothing.
        """
        pushes = [(self._connections[server], *encode(own)) for server, own in by_server.items()]
        with self._lock:
            for connection, _, _ in pushes:
                connection.settle()
            for connection, operations, arrays in pushes:
                connection.push(operations, arrays)

    def flush(self) -> None:
        """Waits until all pushes are acknowledged."""
        with self._lock:
            for connection in self._connections:
                connection.settle()

    def return_shares(self) -> None:
        """Lets others do the shares of rounds that this client has begun and not contributed."""
        with self._lock:
            for connection in self._connections:
                connection.return_shares()

    def watch_rounds(self, idle: Sequence[int]) -> list[IncompleteRound]:
        """Tells all servers which workers have nothing to do; returns the incomplete rounds."""
        message = Message({"do": Request.WATCH_ROUNDS, "idle": list(idle)})
        with self._lock:
            return [
                incomplete
                for connection in self._connections
                for incomplete in connection.request(message).header["rounds"]
            ]

    def complete_rounds(self) -> None:
        """Has all servers apply the contributions that wait for others."""
        with self._lock:
            for connection in self._connections:
                connection.request(Message({"do": Request.COMPLETE_ROUNDS}))

    def set_note(self, key: str, value: bytes) -> bytes:
        """Keeps a note on server 0 unless there is one with that key; returns the one kept."""
        answer = self._request(0, Request.SET_NOTE, [np.frombuffer(value, np.uint8)], key=key)
        return answer.arrays[0].tobytes()

    def get_note(self, key: str) -> bytes | None:
        """Returns the note with that key, or None."""
        answer = self._request(0, Request.NOTE, key=key)
        return answer.arrays[0].tobytes() if answer.arrays else None

    def status(self, server: int) -> ServerStatus:
        """Returns a server's `ParameterServer.status()`."""
        status: ServerStatus = self._request(server, Request.STATUS).header["status"]
        return status

    def close(self) -> None:
        """Ends the connections, without waiting for acknowledgements; can be called twice."""
        for connection in self._connections:
            connection.close()
        with self._lock:
            for connection in self._connections:
                connection.release()

    def _request(
        self, server: int, do: Request, arrays: Sequence[Array] = (), **fields: Any
    ) -> Message:
        with self._lock:
            return self._connections[server].request(Message({"do": do, **fields}, arrays))

    def _keep_answer(self, uids: Sequence[str], have: Sequence[int], answer: Message) -> None:
        arrays = iter(answer.arrays)
        for uid, old, new in zip(uids, have, answer.header["versions"], strict=True):
            if old != new:
                self._cache[uid] = VersionedValue(new, _make_read_only(next(arrays)))


def _are_in_range(spec: ParameterSpec, indices: Array) -> bool:
    """Tells whether these are indices of rows; if not, the server's error says what is wrong."""
    if not spec.shape or indices.dtype.kind not in "iu":
        return False
    return not indices.size or bool(indices.min() >= 0 and indices.max() < spec.shape[0])


def _make_read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array

"""A worker's or coordinator's access to the parameters on all servers."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distribax.parameter_server.client.connection import Connection, RestartReport
from distribax.parameter_server.protocol.operations import Array, Op, encode
from distribax.parameter_server.protocol.parameter_spec import (
    Endpoint,
    OptimizerSpec,
    ParameterSpec,
)
from distribax.parameter_server.protocol.wire import Message


class ParameterClient:
    """Creates, reads and changes parameters on servers; any thread may call it, one at a time.

    Args:
        num_servers: How many servers the cluster has.
        locate: Returns where a server is now; called again whenever a connection breaks.
        client_id: The name of this client in messages and histories. A random text is added, so
            that a restarted process is another client.
        token: The secret of the cluster.
        timeout: How many seconds a server may take to answer or to come back.
        shared_memory: Use shared memory with servers on the same machine.

    `on_restart` can be set to a function that is called with a server's index and a
    `RestartReport` when another incarnation of that server answers.
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
    ) -> None:
        self.client_id = f"{client_id}/{os.urandom(6).hex()}"
        self.on_restart: Callable[[int, RestartReport], None] | None = None
        self._lock = threading.RLock()
        self._cache: dict[str, tuple[int, Array]] = {}
        self._connections = [
            Connection(
                index, locate, self.client_id, token, timeout, shared_memory, self._restarted
            )
            for index in range(num_servers)
        ]

    def create(self, spec: ParameterSpec, value: Any) -> bool:
        """Creates a parameter and returns True; False if its uid exists, which keeps its value."""
        fields = dataclasses.asdict(spec)
        with self._lock:
            connection = self._connection(spec.server)
            message = Message({"do": "create", "spec": fields}, [np.asarray(value)])
            created = bool(connection.request(message).header["created"])
            connection.has_parameters = True
            return created

    def register_optimizer(self, server: int, spec: OptimizerSpec) -> bool:
        """Tells a server of an optimizer for parameters that it has; True if it was new."""
        fields = dataclasses.asdict(spec)
        transformation = np.frombuffer(fields.pop("transformation"), np.uint8)
        with self._lock:
            message = Message({"do": "register", "spec": fields}, [transformation])
            return bool(self._connection(server).request(message).header["created"])

    def pull(self, specs: Sequence[ParameterSpec]) -> list[Array]:
        """Returns the values of parameters, with this client's pushes so far in them."""
        return [value for _, value in self.pull_versions(specs)]

    def pull_versions(self, specs: Sequence[ParameterSpec]) -> list[tuple[int, Array]]:
        """Like `pull`, with each value's version: equal versions of a uid are equal values.

        Only what has changed since this client's last pull travels. What comes from one server
        belongs together: no push is seen in one value and not in another. The arrays are read-only
        and nobody ever changes them, so that JAX may use them without a copy.
        """
        by_server: dict[int, list[ParameterSpec]] = {}
        for spec in specs:
            by_server.setdefault(spec.server, []).append(spec)
        with self._lock:
            for server, wanted in by_server.items():
                self._connection(server).prepare(wanted)
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
        connection = self._connection(server)
        reader = connection.reader(specs)
        if reader is None:
            return False
        found = reader.pull(specs, self._have(specs))
        if found is None:
            return False
        connection.has_parameters = True
        for spec, (version, value) in zip(specs, found, strict=True):
            if value is not None:
                self._cache[spec.uid] = version, _read_only(value)
        return True

    def _ask(self, by_server: Mapping[int, Sequence[ParameterSpec]]) -> None:
        """Fetches what has changed from all servers at the same time."""
        requests = {
            server: Message(
                {"do": "pull", "uids": [spec.uid for spec in specs], "have": self._have(specs)}
            )
            for server, specs in by_server.items()
        }
        for server, answer in self._answers(requests).items():
            self._connection(server).has_parameters = True
            header = requests[server].header
            self._take(header["uids"], header["have"], answer)

    def _answers(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        """Asks all servers, and then takes their answers: they work at the same time."""
        for server, request in requests.items():
            self._connection(server).start(request)
        answers: dict[int, Message] = {}
        errors: list[Exception] = []
        for server, request in requests.items():
            try:
                answers[server] = self._connection(server).finish(request)
            except (RuntimeError, OSError) as error:
                errors.append(error)  # The others' answers must be taken all the same.
        if errors:
            raise errors[0]
        return answers

    def _have(self, specs: Sequence[ParameterSpec]) -> list[int]:
        cache = self._cache
        return [cached[0] if (cached := cache.get(spec.uid)) else 0 for spec in specs]

    def rows(self, spec: ParameterSpec, indices: Any) -> Array:
        """Returns some rows of a parameter, with this client's pushes so far; only they travel."""
        return self.rows_of([(spec, indices)])[0]

    def rows_of(self, wanted: Sequence[tuple[ParameterSpec, Any]]) -> list[Array]:
        """Returns some rows of several parameters; each server is asked once."""
        asked = [(spec, np.asarray(indices)) for spec, indices in wanted]
        found: list[Array | None] = [None] * len(asked)
        places: dict[int, list[int]] = {}
        with self._lock:
            for place, (spec, indices) in enumerate(asked):
                connection = self._connection(spec.server)
                connection.prepare([spec])
                reader = connection.reader([spec]) if _in_range(spec, indices) else None
                found[place] = None if reader is None else reader.rows(spec, indices)
                if found[place] is None:
                    places.setdefault(spec.server, []).append(place)
            requests = {
                server: Message(
                    {"do": "rows", "uids": [asked[place][0].uid for place in own]},
                    [asked[place][1] for place in own],
                )
                for server, own in places.items()
            }
            for server, answer in self._answers(requests).items():
                for place, rows in zip(places[server], answer.arrays, strict=True):
                    found[place] = rows
        return [_read_only(rows) for rows in found if rows is not None]

    def push(self, by_server: Mapping[int, Sequence[Op]]) -> None:
        """Sends operations to servers; each server applies its own once, all or none.

        Returns when they are sent; the arrays must stay as they are until the next call. What goes
        wrong on a server is raised by that call. An error of the push before is raised by this one,
        and then nothing is sent.
        """
        pushes = [(self._connection(server), *encode(own)) for server, own in by_server.items()]
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

    def complete_rounds(self) -> None:
        """Applies the contributions that wait for others, on all servers."""
        with self._lock:
            for connection in self._connections:
                connection.request(Message({"do": "complete_rounds"}))

    def set_note(self, key: str, value: bytes) -> bytes:
        """Keeps a note on server 0 unless there is one of that key; returns the one kept."""
        with self._lock:
            message = Message({"do": "set_note", "key": key}, [np.frombuffer(value, np.uint8)])
            return self._connection(0).request(message).arrays[0].tobytes()

    def note(self, key: str) -> bytes | None:
        """Returns a note, or None if there is none of that key."""
        with self._lock:
            answer = self._connection(0).request(Message({"do": "note", "key": key}))
            return answer.arrays[0].tobytes() if answer.arrays else None

    def delete(self, uids: Iterable[str]) -> None:
        """Removes parameters and optimizers from all servers; unknown ones are passed over."""
        gone = list(uids)
        with self._lock:
            for connection in self._connections:
                connection.request(Message({"do": "delete", "uids": gone}))
            for uid in gone:
                self._cache.pop(uid, None)

    def status(self, server: int) -> dict[str, Any]:
        """Returns a server's `ParameterServer.status()`."""
        with self._lock:
            return dict(
                self._connection(server).request(Message({"do": "status"})).header["status"]
            )

    def acknowledged(self, server: int) -> int:
        """Returns the number of this client's last push that the server has acknowledged."""
        return self._connection(server).acknowledged

    def close(self) -> None:
        """Ends the connections, without waiting for acknowledgements; can be called twice."""
        for connection in self._connections:
            connection.close()
        with self._lock:
            for connection in self._connections:
                connection.release()

    def _connection(self, server: int) -> Connection:
        if not 0 <= server < len(self._connections):
            raise ValueError(f"server={server}, but there are {len(self._connections)} servers.")
        return self._connections[server]

    def _take(self, uids: Sequence[str], have: Sequence[int], answer: Message) -> None:
        arrays = iter(answer.arrays)
        for uid, old, new in zip(uids, have, answer.header["versions"], strict=True):
            if old != new:
                self._cache[uid] = (new, _read_only(next(arrays)))

    def _restarted(self, report: RestartReport) -> None:
        if self.on_restart is not None:
            self.on_restart(report.server, report)


def _in_range(spec: ParameterSpec, indices: Array) -> bool:
    """Tells whether these are indices of rows; if not, the server says what is wrong."""
    if not spec.shape or indices.dtype.kind not in "iu":
        return False
    return not indices.size or bool(indices.min() >= 0 and indices.max() < spec.shape[0])


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array

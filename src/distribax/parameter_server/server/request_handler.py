"""Answers the requests of one client, on its connection to a server."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from distribax.parameter_server.protocol import wire
from distribax.parameter_server.protocol.parameter_spec import OptimizerSpec, ParameterSpec
from distribax.parameter_server.protocol.requests import PARAMETERS_LOST, Request
from distribax.parameter_server.protocol.server_status import ServerStatus
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.server.store import Store, UnknownParameterError
from distribax.parameter_server.shared_memory.arena import CONTROL_SEGMENT
from distribax.parameter_server.shared_memory.mailbox import MailboxReader

_WAIT_SECONDS: Final = 2.0
"""How long one request waits for a round: a client must hear from the server now and then."""
_MAX_DESCRIPTORS: Final = 128
"""Of one answer; the kernel takes 253."""


@dataclass(frozen=True)
class ServerAccess:
    """What a request handler needs of its server.

    Attributes:
        store: What the requests are about.
        hello: Answers a client (its name, the server that it wants) that introduces itself.
        status: Returns the server's status.
        describe_origin: Returns what the server began with, in words.
    """

    store: Store
    hello: Callable[[str, int], dict[str, Any]]
    status: Callable[[], ServerStatus]
    describe_origin: Callable[[], str]


class RequestHandler:
    """Answers one client's requests, one at a time."""

    def __init__(self, server: ServerAccess, connection: socket.socket) -> None:
        self._server = server
        self._store = server.store
        self._connection = connection
        self._client = ""
        self._worker: int | None = None
        self._mailbox = MailboxReader()
        self._segments: set[int] = set()
        self._is_shared = server.store.arena.shared and connection.family == socket.AF_UNIX
        # Each request has a method of its name.
        self._handlers: dict[str, Callable[[Message], Message]] = {
            request: getattr(self, f"_{request}") for request in Request
        }

    def run(self) -> None:
        """Answers until the client closes the connection."""
        try:
            self._answer_requests()
        finally:
            if self._worker is not None:
                self._store.leave(self._worker)

    def _answer_requests(self) -> None:
        while True:
            try:
                request = wire.receive(self._connection)
            except wire.FrameError as error:
                with contextlib.suppress(OSError):
                    wire.send(self._connection, _make_error("FrameError", str(error)))
                return
            answer = self._answer(request)
            try:
                wire.send(self._connection, answer)
            finally:
                for descriptor in answer.descriptors:
                    os.close(descriptor)

    def _answer(self, request: Message) -> Message:
        try:
            return self._handlers[request.header["do"]](request)
        except Exception as error:
            return self._explain(type(error).__name__, str(error))
        finally:
            for descriptor in request.descriptors:
                os.close(descriptor)

    def _explain(self, kind: str, text: str) -> Message:
        if kind == UnknownParameterError.__name__:
            return _make_error(PARAMETERS_LOST, f"{text}; {self._server.describe_origin()}")
        return _make_error(kind, text)

    def _hello(self, request: Message) -> Message:
        self._client = request.header["client"]
        answer = self._server.hello(self._client, request.header["server"])
        if self._worker is None and (worker := request.header["worker"]) is not None:
            self._worker = worker
            self._store.greet(self._client, worker)
        return Message({**answer, "shared": self._is_shared})

    def _create(self, request: Message) -> Message:
        fields = request.header["spec"]
        spec = ParameterSpec(**{**fields, "shape": tuple(fields["shape"])})
        return Message({"created": self._store.create(spec, request.arrays[0])})

    def _register(self, request: Message) -> Message:
        fields = request.header["spec"]
        fields = fields | {name: tuple(fields[name]) for name in ("targets", "slots")}
        spec = OptimizerSpec(transformation=request.arrays[0].tobytes(), **fields)
        return Message({"created": self._store.register_optimizer(spec)})

    def _map(self, request: Message) -> Message:
        """Returns where the values lie, and the memory files that the client does not have.

        One answer has room for some of them only; the client asks again for the others. A client
        that has asked a server on its own machine may be heard by one on another machine.
        """
        if not self._is_shared:
            return Message({"places": [], "segments": []})
        store = self._store
        places: list[list[Any]] = []
        needed = {CONTROL_SEGMENT}
        with store.lock:
            for uid in request.header["uids"]:
                parameter = store.get_parameter(uid)
                block, form = parameter.block, parameter.form
                more = needed | {block.segment}
                if len(more - self._segments) > _MAX_DESCRIPTORS:
                    break
                needed = more
                places.append([block.segment, block.offset, form.shape, form.dtype])
            new = needed - self._segments
            segments = [store.arena.segments[number] for number in sorted(new)]
            # Doubled, as the store may close its own before these are sent.
            descriptors = [os.dup(s.descriptor) for s in segments if s.descriptor is not None]
        self._segments |= new
        header = {
            "places": places,
            "segments": [[segment.number, len(segment.memory)] for segment in segments],
        }
        return Message(header, (), tuple(descriptors))

    def _pull(self, request: Message) -> Message:
        versions, values = self._store.pull(request.header["uids"], request.header["have"])
        return Message({"versions": versions}, values)

    def _rows(self, request: Message) -> Message:
        pairs = zip(request.header["uids"], request.arrays, strict=True)
        return Message({}, [self._store.take_rows(uid, indices) for uid, indices in pairs])

    def _push(self, request: Message) -> Message:
        operations = self._mailbox.read_operations(request)
        error = self._store.push(self._client, request.number, operations).error
        return Message({}) if error is None else self._explain(*error)

    def _begin_shares(self, request: Message) -> Message:
        uids = request.header["uids"]
        return Message({"begun": self._store.begin_shares(self._client, uids, _WAIT_SECONDS)})

    def _return_shares(self, request: Message) -> Message:
        self._store.return_shares(self._client)
        return Message({})

    def _watch_rounds(self, request: Message) -> Message:
        return Message({"rounds": self._store.watch_rounds(request.header["idle"])})

    def _complete_rounds(self, request: Message) -> Message:
        return Message({"rounds": self._store.complete_rounds()})

    def _set_note(self, request: Message) -> Message:
        value = self._store.set_note(request.header["key"], request.arrays[0].tobytes())
        return Message({}, [np.frombuffer(value, np.uint8)])

    def _note(self, request: Message) -> Message:
        value = self._store.notes.get(request.header["key"])
        return Message({}, [] if value is None else [np.frombuffer(value, np.uint8)])

    def _status(self, request: Message) -> Message:
        return Message({"status": self._server.status()})


def _make_error(kind: str, text: str) -> Message:
    return Message({"error": [kind, text]})

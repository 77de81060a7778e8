"""A client's connection to one server, which is made again when it breaks."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from distribax.errors import (
    ParameterServerError,
    ParameterServerUnreachableError,
    ParametersLostError,
)
from distribax.parameter_server.protocol import handshake, sockets, wire
from distribax.parameter_server.protocol.operations import Array, OpCode
from distribax.parameter_server.protocol.parameter_spec import Endpoint, ParameterSpec
from distribax.parameter_server.protocol.requests import PARAMETERS_LOST, Request
from distribax.parameter_server.protocol.wire import Message
from distribax.parameter_server.shared_memory.mailbox import Mailbox
from distribax.parameter_server.shared_memory.reader import SharedReader

_logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 5.0
"""How long to wait for an answer before asking whether the server was restarted elsewhere."""
_BROKEN: Final = (OSError, EOFError)


class _Applied:
    """The numbers of the pushes that the server has applied, as far as the client knows."""

    def __init__(self) -> None:
        self._earlier: list[range] = []
        # The last range, which grows with each push.
        self._start = self._stop = 0

    def add(self, number: int) -> None:
        """Notes that one more is applied; its number is larger than all before."""
        if number != self._stop:
            self._earlier.append(range(self._start, self._stop))
            self._start = number
        self._stop = number + 1

    def forget_after(self, number: int) -> None:
        """Drops those with a larger number."""
        ranges = [*self._earlier, range(self._start, self._stop)]
        kept = [range(each.start, min(each.stop, number + 1)) for each in ranges]
        self._earlier = [each for each in kept if each]
        self._start = self._stop = 0

    def __len__(self) -> int:
        return sum(map(len, self._earlier)) + self._stop - self._start


class Connection:
    """A client's connection to one server; one thread at a time may use it.

    Args:
        server: The server's index.
        locate: Returns where the server is now.
        client: This client's name.
        token: The cluster's secret.
        timeout: How many seconds the server may take to answer or to come back.
        shared_memory: Whether to use shared memory with a server on the same machine.
        worker: The worker whose share of synchronous updates this client computes; None for a
            client that takes part in none.
    """

    def __init__(
        self,
        server: int,
        locate: Callable[[int], Endpoint],
        client: str,
        token: bytes,
        timeout: float,
        shared_memory: bool,
        worker: int | None,
    ) -> None:
        self.has_parameters = False
        """Whether this client knows of parameters on the server."""
        self._server = server
        self._locate = locate
        self._client = client
        self._token = token
        self._timeout = timeout
        self._shared_memory = shared_memory
        self._worker = worker
        self._sequence = 0
        self._started = False
        """Whether an answer is still to be taken by `finish`."""
        self._unacknowledged: Message | None = None
        self._applied = _Applied()
        # The parameters that this client may compute with until it contributes to their rounds.
        self._begun: set[str] = set()
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        self._endpoint: Endpoint | None = None
        self._boot = ""
        self._mailbox: Mailbox | None = None
        self._reader: SharedReader | None = None
        self._closed = False

    # Requests.

    def push(self, operations: list[dict[str, Any]], arrays: Sequence[Array]) -> None:
        """Sends a push; `settle` waits for the answer."""
        self.settle()
        self._connect(self._make_deadline())
        self._sequence += 1
        if any(operation["do"] == OpCode.APPLY for operation in operations):
            self._begun.clear()
        header = {"do": Request.PUSH, "operations": operations}
        message = Message(header, arrays, number=self._sequence)
        self._unacknowledged = message
        # If that fails, `settle` sends it again.
        with contextlib.suppress(*_BROKEN):
            self._send(message)

    def settle(self) -> None:
        """Waits until the last push is acknowledged; raises its error if the server had one."""
        if self._unacknowledged is None:
            return
        deadline = self._make_deadline()
        if self._socket is not None:
            try:
                answer = self._receive(deadline)
            except _BROKEN:
                pass
            else:
                self._acknowledge(answer)
                return
        self._connect(deadline)

    def request(self, message: Message) -> Message:
        """Sends a request that may be repeated, and returns the answer."""
        self.settle()
        deadline = self._make_deadline()
        while True:
            self._connect(deadline)
            try:
                self._send(message)
                answer = self._receive(deadline)
            except _BROKEN as error:
                if time.monotonic() >= deadline:
                    raise self._make_unreachable_error(error) from error
            else:
                return self._check_answer(answer)

    def start(self, message: Message) -> None:
        """Sends a request whose answer `finish` returns; other servers can be asked meanwhile."""
        self._connect(self._make_deadline())
        with contextlib.suppress(*_BROKEN):
            self._send(message)
            self._started = True

    def finish(self, message: Message) -> Message:
        """Returns the answer to a request that was started."""
        if self._started:
            with contextlib.suppress(*_BROKEN):
                answer = self._receive(self._make_deadline())
                self._started = False
                return self._check_answer(answer)
        return self.request(message)

    def prepare_read(self, specs: Sequence[ParameterSpec]) -> None:
        """Waits until this client reads its own writes, and may begin its share of a round."""
        self.settle()
        self._connect(self._make_deadline())
        # No answer is expected now: if there is something to read, the connection has ended.
        if self._is_readable(0):
            self._disconnect()
        if self._worker is None:
            return
        new = {spec.uid for spec in specs} - self._begun
        if not new:
            return
        message = Message({"do": Request.BEGIN_SHARES, "uids": list(new)})
        while not self.request(message).header["begun"]:
            pass
        self._begun |= new

    def return_shares(self) -> None:
        """Lets others do the shares that this client has begun and not contributed."""
        if self._begun:
            self.request(Message({"do": Request.RETURN_SHARES}))
            self._begun.clear()

    def get_reader(self, specs: Sequence[ParameterSpec]) -> SharedReader | None:
        """Returns what reads these parameters from shared memory, or None if that is impossible."""
        self._connect(self._make_deadline())
        reader = self._reader
        while reader is not None and (unknown := reader.find_unknown(specs)):
            answer = self.request(
                Message({"do": Request.MAP, "uids": [spec.uid for spec in unknown]})
            )
            reader = self._reader  # Another one, if the connection had to be made again.
            if reader is not None:
                reader.learn(unknown, answer)
        return reader

    def close(self) -> None:
        """Ends the connection for good, even while another thread waits for an answer."""
        self._closed = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Frees what the connection holds; called after `close`."""
        self._disconnect()
        self._close_mailbox()

    def _close_mailbox(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    # The connection.

    def _make_deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _connect(self, deadline: float) -> None:
        """Makes a connection if there is none, and sends again what was not acknowledged."""
        if self._started:  # It was interrupted: the next answer would be that of another request.
            self._disconnect()
        while self._socket is None:
            if self._closed:
                raise RuntimeError(
                    "This parameter client is closed: its strategy was closed or has ended."
                )
            try:
                self._meet(deadline)
                self._resend(deadline)
            except handshake.WrongTokenError as error:
                self._disconnect()
                raise handshake.WrongTokenError(
                    f"parameter server {self._server} ({self._endpoint}) and this client do not "
                    f"have the same token: {error}. Start all tasks of a cluster with one token."
                ) from error
            except _BROKEN as error:
                self._disconnect()
                if time.monotonic() >= deadline:
                    raise self._make_unreachable_error(error) from error
                time.sleep(_PAUSE_SECONDS)

    def _meet(self, deadline: float) -> None:
        self._endpoint = endpoint = self._locate(self._server)
        connection = sockets.call(endpoint, max(0.1, deadline - time.monotonic()))
        # This bounds the pauses within an answer; `_receive` bounds the wait for its first byte.
        connection.settimeout(self._timeout)
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        try:
            handshake.introduce(
                connection, self._token, min(self._timeout, handshake.HANDSHAKE_SECONDS)
            )
            self._send(
                Message(
                    {
                        "do": Request.HELLO,
                        "client": self._client,
                        "server": self._server,
                        "worker": self._worker,
                    }
                )
            )
            hello = self._check_answer(self._receive(deadline)).header
            self._open_shared_memory(hello["shared"])
            self._take_hello(hello)
        except BaseException:
            self._disconnect()
            raise

    def _open_shared_memory(self, readable: bool) -> None:
        """Prepares to use shared memory, if the server is on this machine."""
        assert self._socket is not None
        if not self._shared_memory or self._socket.family != getattr(socket, "AF_UNIX", None):
            # The server before this one may have been here.
            self._close_mailbox()
            return
        self._mailbox = self._mailbox or Mailbox()
        self._mailbox.forget()
        self._reader = SharedReader() if readable else None

    def _take_hello(self, hello: dict[str, Any]) -> None:
        old, self._boot = self._boot, hello["boot"]
        if not old or old == self._boot:
            return
        self._begun.clear()
        before = len(self._applied)
        self._applied.forget_after(hello["sequence"])
        lost = before - len(self._applied)
        _logger.warning(
            "Reconnected to parameter server %d, which was restarted: %s. Lost pushes of this "
            "process: %d of %d.",
            self._server,
            hello["origin"],
            lost,
            before,
        )
        if self.has_parameters and not hello["parameters"]:
            self.has_parameters = False
            self._unacknowledged = None
            raise ParametersLostError(self._server, hello["origin"])

    def _resend(self, deadline: float) -> None:
        if self._unacknowledged is not None:
            self._send(self._unacknowledged)
            self._acknowledge(self._receive(deadline))

    def _acknowledge(self, answer: Message) -> None:
        assert self._unacknowledged is not None
        number = self._unacknowledged.number
        self._unacknowledged = None
        self._check_answer(answer)
        self._applied.add(number)

    def _send(self, message: Message) -> None:
        assert self._socket is not None
        try:
            if self._mailbox is not None and message.header["do"] == Request.PUSH:
                message = self._mailbox.wrap(message)
            wire.send(self._socket, message)
        except BaseException:
            # Also when interrupted: after half a message, the connection is of no use.
            self._disconnect()
            raise

    def _receive(self, deadline: float) -> Message:
        assert self._socket is not None
        try:
            while not self._is_readable(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError("no answer")
                if self._boot and self._locate(self._server).boot != self._boot:
                    raise ConnectionResetError("the server was restarted")
            return wire.receive(self._socket)
        except BaseException:
            self._disconnect()
            raise

    def _is_readable(self, seconds: float) -> bool:
        assert self._socket is not None
        return bool(self._poll.poll(seconds * 1000))

    def _check_answer(self, answer: Message) -> Message:
        error = answer.header.get("error")
        if error is None:
            return answer
        kind, text = error
        if kind == PARAMETERS_LOST:
            raise ParametersLostError(self._server, text)
        raise ParameterServerError(self._server, kind, text)

    def _make_unreachable_error(self, error: BaseException) -> ParameterServerUnreachableError:
        where = "" if self._endpoint is None else str(self._endpoint)
        trouble = f"{type(error).__name__}: {error}"
        return ParameterServerUnreachableError(self._server, where, self._timeout, trouble)

    def _disconnect(self) -> None:
        self._reader = None
        self._started = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None

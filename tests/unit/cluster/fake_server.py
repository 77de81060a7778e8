"""A small HTTP server for one test: real sockets on 127.0.0.1, answers from a function."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_JOIN_SECONDS = 300.0


@dataclass(frozen=True)
class Call:
    """A request that the server got."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class FakeServer:
    """Where the server is, and what it was asked."""

    host: str
    port: int
    calls: list[Call] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


Answer = tuple[int, Any]
"""A status and the body: text as it is, everything else as JSON."""


@contextlib.contextmanager
def serving(
    answer: Callable[[Call], Answer], tls: ssl.SSLContext | None = None
) -> Iterator[FakeServer]:
    """Runs a server until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _JOIN_SECONDS

        def _serve(self) -> None:
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            call = Call(
                self.command,
                url.path,
                {name: values[-1] for name, values in parse_qs(url.query).items()},
                {name.lower(): value for name, value in self.headers.items()},
                json.loads(self.rfile.read(length)) if length else None,
            )
            server.calls.append(call)
            status, body = answer(call)
            payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = _serve
        do_POST = _serve

        def log_message(self, *args: object) -> None:
            del args

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    server = FakeServer("127.0.0.1", listener.server_port)
    if tls is not None:
        listener.socket = tls.wrap_socket(listener.socket, server_side=True)
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), name="fake-server")
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join(_JOIN_SECONDS)
        listener.server_close()
        assert not thread.is_alive()

"""Parameter servers in this process, and clients that reach them in each possible way."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from distribax.parameter_server import Endpoint, ParameterClient, ParameterServer

TOKEN = b"the cluster's secret"
TIMEOUT = 60.0


class Cluster:
    """Servers and clients of one test; `transport` is how clients reach servers."""

    def __init__(self, stack: contextlib.ExitStack, transport: str) -> None:
        self.transport = transport
        self.servers: list[ParameterServer] = []
        self.endpoints: list[Endpoint] = []
        self._stack = stack

    def start(self, **settings: Any) -> ParameterServer:
        """Starts one more server."""
        server, endpoint = self._started(len(self.servers), settings)
        self.servers.append(server)
        self.endpoints.append(endpoint)
        return server

    def restart(self, index: int = 0, **settings: Any) -> ParameterServer:
        """Ends a server and starts it again at another address."""
        self.servers[index].close()
        self.servers[index], self.endpoints[index] = self._started(index, settings)
        return self.servers[index]

    def client(self, name: str = "client", **settings: Any) -> ParameterClient:
        """Makes a client; servers are started if there are none."""
        if not self.servers:
            self.start()
        settings = {"token": TOKEN, "timeout": TIMEOUT} | settings
        client = ParameterClient(len(self.servers), self.locate, client_id=name, **settings)
        self._stack.callback(client.close)
        return client

    def locate(self, index: int) -> Endpoint:
        """Returns where a server is, without its unix socket if the test is about TCP."""
        endpoint = self.endpoints[index]
        return endpoint if self.transport != "tcp" else dataclasses.replace(endpoint, unix="")

    def _started(self, index: int, settings: Any) -> tuple[ParameterServer, Endpoint]:
        shared = {"shared_memory": self.transport == "shared"}
        server = ParameterServer(index, **({"token": TOKEN} | shared | settings))
        self._stack.callback(server.close)
        return server, server.start()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Servers and clients that use whatever is best."""
    with contextlib.ExitStack() as stack:
        yield Cluster(stack, "shared")


@pytest.fixture(params=["shared", "unix", "tcp"])
def any_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Servers and clients, once for each way of reaching a server."""
    with contextlib.ExitStack() as stack:
        yield Cluster(stack, request.param)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield ours, theirs

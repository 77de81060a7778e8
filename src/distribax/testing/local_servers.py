"""A parameter server strategy whose servers are threads of this process, for tests of steps."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from distribax.execution import named_objects
from distribax.parameter_server import ParameterClient, ParameterServer
from distribax.parameter_server.placement import ParameterLink
from distribax.parameter_server.strategy import ParameterServerExtended
from distribax.strategies.strategy import Strategy


class LocalServersStrategy(Strategy):
    """Variables on servers, as under `ParameterServerStrategy`; steps run where they are called.

    It needs no Ray and starts at once. The servers are real: values go through their sockets.
    """

    def __init__(self, link: ParameterLink, contributions: int = 1) -> None:
        super().__init__(ParameterServerExtended(link, 1, contributions))
        self.link = link
        self._uid = named_objects.new_uid()
        self.variable_partitioner: Any = None
        named_objects.know(self._uid, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return named_objects.known, (self._uid,)


@contextlib.contextmanager
def local_servers(num_servers: int = 1, contributions: int = 1) -> Iterator[LocalServersStrategy]:
    """Starts servers in this process, yields a strategy that uses them, and ends them.

    Example:
        with dx.testing.local_servers(2) as strategy:
            with strategy.scope():
                v = dx.Variable(1.0)
    """
    token = secrets.token_bytes(16)
    servers = [
        ParameterServer(index, token=token, snapshot_dir=None, snapshot_interval=None)
        for index in range(num_servers)
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        endpoints = [server.start() for server in servers]
        client = ParameterClient(
            num_servers, endpoints.__getitem__, client_id="coordinator", token=token
        )
        stack.callback(client.close)
        yield LocalServersStrategy(
            ParameterLink(client, num_servers, is_coordinator=True), contributions
        )

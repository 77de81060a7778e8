"""A parameter server strategy whose servers are threads of this process, for tests of steps."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from distribax.execution import named_objects
from distribax.parameter_server import ParameterClient, ParameterServer
from distribax.parameter_server.extended import ServedStrategy
from distribax.parameter_server.placement import ParameterSource
from distribax.parameter_server.settings import RoundSettings


class LocalServersStrategy(ServedStrategy):
    """Variables on servers, as under `ParameterServerStrategy`; steps run where they are called.

    It needs no Ray and starts at once. The servers are real: values go through their sockets. Use
    `local_servers` to create one.
    """


@contextlib.contextmanager
def local_servers(num_servers: int = 1, contributions: int = 1) -> Iterator[LocalServersStrategy]:
    """Starts servers in this process, yields a strategy that uses them, and ends them.

    Args:
        num_servers: How many servers.
        contributions: How many gradients are averaged into one update.

    Yields:
        The strategy.

    >>> import distribax as dx
    >>> with local_servers(2) as strategy, strategy.scope():
    ...     v = dx.Variable([1.0, 2.0])
    ...     print(v.numpy())
    [1. 2.]
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
        source = ParameterSource(client, num_servers, is_coordinator=True)
        rounds = RoundSettings(contributions)
        yield LocalServersStrategy(named_objects.make_uid(), source, 1, rounds)

"""A worker's side of parameter-server training: the strategy as scheduled functions see it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

from distribax.execution import named_objects
from distribax.parameter_server.actor import connect_to_servers
from distribax.parameter_server.extended import ServedStrategy
from distribax.parameter_server.placement import ParameterSource
from distribax.parameter_server.settings import RoundSettings
from distribax.topology.host_memory import keep_freed_memory

# The JAX settings that change numbers: a worker computes with those of the coordinator.
_NUMERIC_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
)

_is_worker = False


def is_worker_process() -> bool:
    """Tells whether this process runs functions for a coordinator."""
    return _is_worker


def read_jax_settings() -> dict[str, object]:
    """Returns the JAX settings of this process that change numbers."""
    return {name: getattr(jax.config, name) for name in _NUMERIC_SETTINGS}


class WorkerStrategy(ServedStrategy):
    """The strategy in a worker's process: the same variables, one replica."""

    def flush(self) -> None:
        """Waits until the servers have everything that functions have sent."""
        try:
            self.source.client.flush()
        finally:
            self.source.client.return_shares()

    def check_servers(self) -> None:
        """Raises a ParameterServerUnreachableError unless all servers answer."""
        for server in range(self.source.num_servers):
            self.source.client.status(server)


@dataclass(frozen=True)
class WorkerSetup:
    """What turns a process into a worker of a strategy; the coordinator sends it to each."""

    uid: str
    namespace: str
    token: str
    num_workers: int
    num_servers: int
    rounds: RoundSettings
    jax_settings: dict[str, object]

    def start(self, worker_index: int) -> WorkerStrategy:
        """Connects this process to the servers, and returns its side of the strategy."""
        global _is_worker
        _is_worker = True
        keep_freed_memory()
        for name, value in self.jax_settings.items():
            jax.config.update(name, value)
        client_id = f"worker-{worker_index}-{os.getpid()}-{named_objects.make_uid()[:8]}"
        client = connect_to_servers(
            self.num_servers,
            self.namespace,
            self.token,
            client_id,
            worker_index if self.rounds.num_shares > 1 else None,
        )
        source = ParameterSource(client, self.num_servers, is_coordinator=False)
        return WorkerStrategy(self.uid, source, self.num_workers, self.rounds)

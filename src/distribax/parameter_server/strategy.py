"""Variables on parameter servers, functions on workers, one coordinator: asynchronous training."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from distribax import contracts, progress
from distribax.cluster.ray import engine as engines
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.execution import named_objects
from distribax.parameter_server.actor import ServerGroup, ServerHealth, connect_to_servers
from distribax.parameter_server.extended import ServedStrategy
from distribax.parameter_server.placement import ParameterSource
from distribax.parameter_server.settings import (
    RoundSettings,
    ServerSettings,
    check_cluster,
    check_settings,
)
from distribax.parameter_server.worker import WorkerSetup, is_worker_process, read_jax_settings

_logger = logging.getLogger(__name__)

_NUM_WORKERS, _NUM_SERVERS = 2, 1


class ParameterServerStrategy(ServedStrategy):
    """Variables live on parameter servers; workers run functions that a coordinator schedules.

    A step fetches the variables that it reads when it begins, and sends its updates when it ends,
    without waiting for other workers. Create variables inside `with strategy.scope():`, and
    schedule functions with `dx.coordinator.ClusterCoordinator(strategy)`.

    Args:
        cluster_resolver: The cluster, with a task for each worker (`worker`) and server (`ps`);
            each is a `dx.Server` process. None takes the one that TF_CONFIG describes, if it has
            servers, or else starts a cluster on this machine that ends with the program.
        variable_partitioner: How large variables are divided over the servers, for example
            `dx.partitioners.MinSizePartitioner()`; None leaves each variable whole.
        num_workers: The number of workers of a cluster on this machine, or on the Ray cluster at
            `address`.
        num_ps: The number of servers, likewise.
        address: The address of a running Ray cluster to use.
        synchronous: Whether the gradients of all workers are averaged into one update, instead
            of being applied one by one.
        round_timeout: With `synchronous`: after how many seconds an update is applied without the
            gradients of workers that are late. None, the default, waits for all of them.
        snapshot_interval: How many seconds pass between two snapshots of a server, from which it is
            restarted if it dies. None turns them off: the death of a server is then an error.
        snapshot_dir: Where the servers keep their snapshots; by default a folder that is removed
            at the end.
        server_timeout: After how many seconds without an answer a server is restarted.

    Raises:
        ValueError: If a number is out of range, or the cluster is described twice.
        TypeError: If an argument has the wrong type.
        RuntimeError: If this process is a worker.

    Example:
        ```python
        strategy = dx.ParameterServerStrategy(num_workers=2, num_ps=1)
        coordinator = dx.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            v = dx.Variable(0.0)
        coordinator.schedule(lambda: v.assign_add(1.0))
        coordinator.join()
        ```
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        num_workers: int | None = None,
        num_ps: int | None = None,
        address: str | None = None,
        synchronous: bool = False,
        round_timeout: float | None = None,
        snapshot_interval: float | None = 30.0,
        snapshot_dir: str | os.PathLike[str] | None = None,
        server_timeout: float = 20.0,
    ) -> None:
        if is_worker_process():
            raise RuntimeError(
                "ParameterServerStrategy: created in a worker process. Only the coordinator "
                "creates it; put the code that does into `if __name__ == '__main__':`, or into the "
                "function that the program starts with, so that importing the module does not run "
                "it."
            )
        check_cluster(cluster_resolver, num_workers, num_ps, address)
        check_settings(
            variable_partitioner,
            snapshot_interval,
            snapshot_dir,
            server_timeout,
            synchronous,
            round_timeout,
        )
        uid = named_objects.make_uid()
        engine = _make_engine(cluster_resolver, num_workers, num_ps, address)
        try:
            folder = os.fspath(snapshot_dir or engine.get_snapshot_folder())
            settings = [
                ServerSettings(
                    index,
                    engine.get_server_host(index),
                    engine.token.encode(),
                    uid,
                    folder,
                    snapshot_interval,
                )
                for index in range(engine.num_servers)
            ]
            options = [engine.make_server_options(index) for index in range(engine.num_servers)]
            with progress.show(f"starting {engine.num_servers} parameter servers"):
                self._servers = ServerGroup(settings, options)
                client = connect_to_servers(
                    engine.num_servers,
                    engine.namespace,
                    engine.token,
                    f"coordinator-{uid}",
                    is_coordinator=True,
                )
            self._servers.watch(server_timeout)
        except BaseException:
            engine.close()
            raise
        self.engine = engine
        self._resolver = cluster_resolver
        self._rounds = RoundSettings(engine.num_workers if synchronous else 1, round_timeout)
        source = ParameterSource(client, engine.num_servers, is_coordinator=True)
        super().__init__(uid, source, engine.num_workers, self._rounds)
        self.variable_partitioner = variable_partitioner
        # The one coordinator of this strategy, once there is one; it sets this itself.
        self.cluster_coordinator: contracts.Coordinator | None = None
        self._keeps_snapshots = snapshot_dir is not None
        self._closed = False
        self._closing = threading.Lock()
        atexit.register(self.close)

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that the strategy was made with, or None."""
        return self._resolver

    @property
    def servers(self) -> list[ServerHealth]:
        """What is known of each parameter server: restarts, updates applied, what was lost."""
        return self._servers.health

    def server_status(self) -> list[Mapping[str, Any]]:
        """Returns what is known of each parameter server as plain data.

        Returns:
            For each server a dict with `index`, `restarts`, `lost` and what the server said last.
        """
        return [
            {"index": each.index, "restarts": each.restarts, "lost": each.lost, **each.status}
            for each in self.servers
        ]

    def snapshot(self) -> list[str]:
        """Has every server save its state now.

        Returns:
            The path of each server's snapshot, on the server's machine.

        Raises:
            RuntimeError: If the strategy was closed.
            OSError: If a server cannot write its snapshot.
            ParameterServerUnreachableError: If a server has not answered in time.
            RayStoppedError: If Ray has failed, and could not be started again.
        """
        self._require_open("snapshot")
        return self._servers.snapshot()

    def worker_setup(self) -> WorkerSetup:
        """Returns what turns a process into a worker of this strategy.

        Raises:
            RuntimeError: If the strategy was closed.
        """
        self._require_open("ClusterCoordinator")
        return WorkerSetup(
            self._uid,
            self.engine.namespace,
            self.engine.token,
            self.engine.num_workers,
            self.engine.num_servers,
            self._rounds,
            read_jax_settings(),
        )

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(
                f"{what}: the strategy was closed, and its servers have ended. Make another "
                "ParameterServerStrategy, and its variables in its scope."
            )

    def complete_rounds(self) -> None:
        """Applies a synchronous update without the gradients that are missing.

        After `coordinator.join()` these are gradients of the last functions, if their number is not
        a multiple of the number of workers.
        """
        if self._rounds.num_shares > 1:
            self.source.client.complete_rounds()

    def watch_rounds(self, idle: Sequence[int]) -> list[Mapping[str, Any]]:
        """Tells the servers which workers have nothing to do, so that others do their shares.

        Args:
            idle: The indices of these workers.

        Returns:
            For each synchronous update that is incomplete a dict with `contributions`,
            `num_shares`, `seconds` (since the first contribution), `missing` (the workers whose
            gradients are missing) and `waiting` (the workers that wait).
        """
        if self._rounds.num_shares == 1:
            return []
        return list(self.source.client.watch_rounds(idle))

    def finish_rounds(self) -> None:
        """Ends what has been scheduled: applies incomplete updates, if there is a `round_timeout`.

        Without one they stay until functions that are scheduled later complete them, and a warning
        says so.
        """
        if self._rounds.timeout is not None:
            self.complete_rounds()
            return
        incomplete = self.watch_rounds(())
        if incomplete:
            _logger.warning(
                "A synchronous update has %d of %d gradients and waits for the others: functions "
                "that you schedule next complete it. Schedule a multiple of %d functions, or call "
                "strategy.complete_rounds() to apply it as it is.",
                incomplete[0]["contributions"],
                *[incomplete[0]["num_shares"]] * 2,
            )

    def close(self) -> None:
        """Ends the coordinator, the servers and, if it was started for this strategy, Ray.

        Further calls do nothing, also those of other threads while the first one is busy.
        """
        if not self._closing.acquire(blocking=False):
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.cluster_coordinator is not None:
            self.cluster_coordinator.close()
        with contextlib.suppress(OSError):
            self.source.client.close()
        self._servers.close(keep_snapshots=self._keeps_snapshots)
        self.engine.close()

    @override
    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[str], object], tuple[str]]:
        if named_objects.get_destination() not in (None, self):
            raise TypeError(
                "it refers to another ParameterServerStrategy than that of the coordinator, or to "
                "a variable of another one, which only the workers of that one know"
            )
        return super().__reduce_ex__(protocol)


def _make_engine(
    resolver: ClusterResolver | None,
    num_workers: int | None,
    num_ps: int | None,
    address: str | None,
) -> engines.Engine:
    if resolver is None and num_workers is None and num_ps is None and address is None:
        # Started by `distribax run --ps`, or by somebody else who sets TF_CONFIG.
        resolver = engines.detect_resolver()
    if resolver is not None:
        if num_workers is not None or num_ps is not None or address is not None:
            raise ValueError(
                "ParameterServerStrategy: cluster_resolver says which workers and servers there "
                "are; drop num_workers, num_ps and address."
            )
        return engines.from_resolver(resolver)
    workers, servers = num_workers or _NUM_WORKERS, num_ps or _NUM_SERVERS
    if address is not None:
        return engines.from_address(address, workers, servers)
    return engines.start_embedded(workers, servers)

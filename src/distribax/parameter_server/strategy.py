"""Variables on parameter servers, functions on workers, one coordinator: asynchronous training."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distribax.cluster.ray import engine as engines
from distribax.execution import named_objects
from distribax.parameter_server import Endpoint, ParameterClient, ParameterSpec, keep_freed_memory
from distribax.parameter_server.actor import ServerActor, ServerHealth, ServerWatch, take_snapshots
from distribax.parameter_server.optimizer import ServedUpdate, note_key
from distribax.parameter_server.placement import ParameterLink, Served
from distribax.parameter_server.settings import ServerSettings, check_cluster, check_settings
from distribax.strategies.extended import get_colocated
from distribax.strategies.one_device import SingleExtended
from distribax.strategies.strategy import Strategy
from distribax.types import Args, Kwargs, VariableSynchronization
from distribax.variables import Placement, ShardedVariable, Variable
from distribax.variables.sharded import sharded_variable

# How long a process waits for a server that does not answer, or is being restarted.
_SERVER_SECONDS = 60.0
_END_SECONDS = 5.0
_LOCATE_SECONDS = 5.0
_NUM_WORKERS, _NUM_SERVERS = 2, 1
# What can be given to `dx.Variable` without its name.
_POSITIONAL = ("initial_value", "trainable", "name", "dtype")
# JAX's settings that numbers depend on: a worker computes with those of the coordinator.
_NUMERIC_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
)


class ParameterServerExtended(SingleExtended):
    """Places variables on servers; a step runs as one replica in the process that calls it."""

    def __init__(self, link: ParameterLink, num_workers: int, contributions: int) -> None:
        super().__init__(None)
        self.link = link
        self._num_workers = num_workers
        self._contributions = contributions

    @property
    def worker_devices(self) -> tuple[str, ...]:
        count = range(self._num_workers)
        return tuple(f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in count)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        count = range(self.link.num_servers)
        return tuple(f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in count)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Returns the first variable by name; what belongs to none goes beside it."""
        if not var_list:
            raise ValueError(
                "non_slot_devices: var_list is empty. Non-slot variables go to the server of the "
                "variables being optimized; pass those."
            )
        return min(var_list, key=lambda variable: variable.name)

    def _placement(self, synchronization: VariableSynchronization, name: str) -> Placement:
        return Served(self.link, name=name)

    def create_variable(self, create: Callable[..., Variable], args: Args, kwargs: Kwargs) -> Any:
        partitioner = getattr(self.strategy, "variable_partitioner", None)
        # Beside another variable, the variable itself decides where it is.
        if partitioner is None or get_colocated() is not None or len(args) > len(_POSITIONAL):
            return create(*args, **kwargs)
        named = dict(zip(_POSITIONAL, args, strict=False))
        with self.link.apart():
            return sharded_variable.created(create, named | dict(kwargs), partitioner)

    def served_placement(self, specs: tuple[ParameterSpec, ...], name: str) -> Placement:
        """Returns the placement of a variable that exists already."""
        return Served(self.link, specs=specs, name=name)

    def served_update(self, *, uid: str, **settings: Any) -> ServedUpdate:
        """Returns how an optimizer updates variables of this strategy."""
        return ServedUpdate(uid=uid, rounds=self._contributions, **settings)

    def targets_of(self, uid: str) -> list[Any] | None:
        """Returns the variables that an optimizer was built for in another process, or None."""
        note = self.link.client.note(note_key(uid))
        if note is None:
            return None
        uids = json.loads(note)
        return [_target([named_objects.known(uid) for uid in shards]) for shards in uids]


def _target(variables: list[Any]) -> Any:
    if any(variable is None for variable in variables):
        raise RuntimeError("optimizer: it updates variables that this process no longer refers to.")
    return ShardedVariable.of(variables)


class ParameterServerStrategy(Strategy):
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
        snapshot_interval: Every so many seconds each server saves its state, to be restarted from
            if it dies. None turns it off: the death of a server is then an error.
        snapshot_dir: Where the servers save it; a folder that is removed at the end by default.
        server_timeout: After so many seconds without an answer a server is restarted.

    Example:
        strategy = dx.ParameterServerStrategy(num_workers=2, num_ps=1)
        coordinator = dx.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            v = dx.Variable(0.0)
        coordinator.schedule(lambda: v.assign_add(1.0))
        coordinator.join()
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        num_workers: int | None = None,
        num_ps: int | None = None,
        address: str | None = None,
        synchronous: bool = False,
        snapshot_interval: float | None = 30.0,
        snapshot_dir: str | os.PathLike[str] | None = None,
        server_timeout: float = 20.0,
    ) -> None:
        _refuse_in_worker()
        check_cluster(cluster_resolver, num_workers, num_ps, address)
        check_settings(
            variable_partitioner, snapshot_interval, snapshot_dir, server_timeout, synchronous
        )
        self.engine = _engine(cluster_resolver, num_workers, num_ps, address)
        self._resolver = cluster_resolver
        self._uid = named_objects.new_uid()
        self._closed = False
        self._contributions = self.engine.num_workers if synchronous else 1
        try:
            self._removes_snapshots = snapshot_dir is None
            folder = os.fspath(snapshot_dir or self.engine.snapshot_folder())
            self.server_actors = self._start_servers(folder, snapshot_interval)
            client = _client(self.engine, f"coordinator-{self._uid}")
            link = ParameterLink(client, self.engine.num_servers, is_coordinator=True)
            self._watch = ServerWatch(self.server_actors, server_timeout)
        except BaseException:
            self.engine.close()
            raise
        named_objects.know(self._uid, self)
        extended = ParameterServerExtended(link, self.engine.num_workers, self._contributions)
        super().__init__(extended)
        self.variable_partitioner = variable_partitioner
        # The one coordinator of this strategy, once there is one.
        self.cluster_coordinator: Any = None
        atexit.register(self.close)

    def _start_servers(self, folder: str, interval: float | None) -> list[Any]:
        import ray

        kind = ray.remote(ServerActor)
        actors = []
        for index in range(self.engine.num_servers):
            settings = ServerSettings(
                index,
                self.engine.server_host(index),
                self.engine.token.encode(),
                self._uid,
                folder,
                interval,
            )
            options = self.engine.server_options(index)
            actors.append(kind.options(**options).remote(settings))
        return actors

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was made with, or None."""
        return self._resolver

    @property
    def servers(self) -> list[ServerHealth]:
        """What is known of each parameter server: restarts, updates applied, what was lost."""
        return self._watch.health

    def server_status(self) -> list[dict[str, Any]]:
        """Returns `servers` as plain data."""
        return [
            {"index": each.index, "restarts": each.restarts, "lost": each.lost, **each.status}
            for each in self.servers
        ]

    def snapshot(self) -> list[str]:
        """Has every server save its state now; returns where."""
        self._require_open("snapshot")
        return take_snapshots(self.server_actors, _SERVER_SECONDS)

    def worker_setup(self) -> WorkerSetup:
        """Returns what a worker process needs to take part in this strategy."""
        self._require_open("ClusterCoordinator")
        return WorkerSetup(
            self._uid,
            self.engine.namespace,
            self.engine.token,
            self.engine.num_workers,
            self.engine.num_servers,
            self._contributions,
            {name: getattr(jax.config, name) for name in _NUMERIC_SETTINGS},
        )

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(
                f"{what}: the strategy was closed, and its servers have ended. Make another "
                "ParameterServerStrategy, and its variables in its scope."
            )

    def complete_rounds(self) -> None:
        """Applies the gradients of a synchronous update that not all workers have sent yet."""
        if self._contributions > 1:
            self._link.client.complete_rounds()

    @property
    def _link(self) -> ParameterLink:
        extended = self.extended
        assert isinstance(extended, ParameterServerExtended)
        return extended.link

    def close(self) -> None:
        """Ends the servers and, if it was started for this strategy, the cluster."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.cluster_coordinator is not None:
            self.cluster_coordinator.close()
        self._watch.close()
        with contextlib.suppress(OSError):
            self._link.client.close()
        if self._removes_snapshots:
            self._end_servers()
        self.engine.close()

    def _end_servers(self) -> None:
        """Has the servers remove their snapshots, which may be on other machines."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # They may be gone.
            pending = [actor.end.remote() for actor in self.server_actors]
            ray.wait(pending, num_returns=len(pending), timeout=_END_SECONDS)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if named_objects.destination() not in (None, self):
            raise TypeError(
                "it refers to another ParameterServerStrategy than that of the coordinator, or to "
                "a variable of another one, which only the workers of that one know"
            )
        return _here, (self._uid,)


class WorkerStrategy(Strategy):
    """The strategy as a worker's functions see it: the same variables, one replica."""

    def __init__(self, setup: WorkerSetup, worker_index: int) -> None:
        name = f"worker-{worker_index}-{os.getpid()}-{named_objects.new_uid()[:8]}"
        client = _client(setup, name)
        link = ParameterLink(client, setup.num_servers, is_coordinator=False)
        super().__init__(ParameterServerExtended(link, setup.num_workers, setup.contributions))
        self._uid = setup.uid
        self.link = link
        named_objects.know(setup.uid, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _here, (self._uid,)


@dataclass
class WorkerSetup:
    """What a worker process needs to take part, and how it then runs functions."""

    uid: str
    namespace: str
    token: str
    num_workers: int
    num_servers: int
    contributions: int
    jax_settings: dict[str, Any]
    strategy: WorkerStrategy | None = None
    _scope: Any = None

    def start(self, worker_index: int) -> None:
        """Connects this process to the servers."""
        global _in_worker
        _in_worker = True
        keep_freed_memory()
        for name, value in self.jax_settings.items():
            jax.config.update(name, value)
        self.strategy = WorkerStrategy(self, worker_index)
        self._scope = self.strategy.scope()

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a function in the strategy's scope."""
        with self._scope:
            return fn(*args, **kwargs)

    def flush(self) -> None:
        """Waits until the servers have everything that functions have sent."""
        assert self.strategy is not None
        self.strategy.link.client.flush()


_in_worker = False


def _refuse_in_worker() -> None:
    if _in_worker:
        raise RuntimeError(
            "ParameterServerStrategy: created in a worker process. Only the coordinator creates "
            "it; put the code that does into `if __name__ == '__main__':`, or into the function "
            "that the program starts with, so that importing the module does not run it."
        )


def _here(uid: str) -> Any:
    strategy = named_objects.known(uid)
    if strategy is None:
        raise RuntimeError("ParameterServerStrategy: this process is not a worker of the strategy.")
    return strategy


def _engine(
    resolver: Any, num_workers: int | None, num_ps: int | None, address: str | None
) -> engines.Engine:
    if resolver is None and num_workers is None and num_ps is None and address is None:
        # Started by `distribax run --ps`, or by somebody else who sets TF_CONFIG.
        resolver = engines.surrounding_resolver()
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
    return engines.embedded(workers, servers)


def _client(engine: Any, name: str) -> ParameterClient:
    """Connects this process to the servers, wherever they are after a restart."""
    namespace = engine.namespace

    def locate(index: int) -> Endpoint:
        import ray

        # The client asks again until its own patience is at an end: servers take time to restart.
        try:
            actor = ray.get_actor(f"server-{index}", namespace=namespace)
            endpoint: Endpoint = ray.get(actor.endpoint.remote(), timeout=_LOCATE_SECONDS)
        except (ray.exceptions.RayError, ValueError) as error:
            raise ConnectionError(f"parameter server {index} is not there: {error}") from error
        return endpoint

    token = engine.token.encode()
    return ParameterClient(
        engine.num_servers, locate, client_id=name, token=token, timeout=_SERVER_SECONDS
    )

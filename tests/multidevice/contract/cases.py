"""What the contract runs on: every strategy, with 1 to 3 (or 4) replicas, eager and compiled.

In a process that tests/multiprocess/contract has made one of several workers, it is their strategy
instead, with the replicas that they have together.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distribax as dx
from distribax.testing.local_servers import local_servers
from tests.environment import COMPLETE
from tests.multidevice.contract.other_workers import TOGETHER, from_all_workers

# `make contract` has all sizes. `make test` has one size of each strategy, three where there can be
# several; two are tried in worker processes and in the seeds, and one mirrored replica by the tests
# that name it.
SETUPS = (
    [("multi_worker", jax.device_count())]
    if TOGETHER
    else [
        ("default", 1),
        ("one_device", 1),
        ("served", 1),
        *(("mirrored", count) for count in ((1, 2, 3, 4) if COMPLETE else (3,))),
        *(("central", count) for count in ((1, 2, 3, 4) if COMPLETE else (3,))),
    ]
)
SEVERAL = [setup for setup in SETUPS if setup[1] > 1]

BATCH = np.arange(12, dtype=np.float32)
"""One global batch; it splits evenly over 1, 2, 3 and 4 replicas."""


def device(index: int) -> jax.Device:
    """Returns a device of this process: the one with that index, if there are so many."""
    here = jax.local_devices()
    return here[index % len(here)]


_keep_open = contextlib.ExitStack()
atexit.register(_keep_open.close)


@cache
def make_strategy(kind: str, num_replicas: int) -> Any:
    """Returns the one strategy of a kind and size that all tests share."""
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    if kind == "multi_worker":
        return dx.MultiWorkerMirroredStrategy()
    if kind == "mirrored":
        return dx.MirroredStrategy(devices)
    if kind == "central":
        # A parameter device of its own, so that a copy that is forgotten shows.
        return dx.CentralStorageStrategy(devices, parameter_device="CPU:5")
    if kind == "served":
        return _keep_open.enter_context(local_servers(1))
    return dx.OneDeviceStrategy("CPU:1") if kind == "one_device" else dx.get_strategy()


def replicas_of(strategy: Any) -> range:
    """Returns the numbers of a strategy's replicas that run in this process.

    They are all there are, unless there are several workers.
    """
    extended = strategy.extended
    count = len(extended.local_devices) if TOGETHER else strategy.num_replicas_in_sync
    return range(extended.first_replica, extended.first_replica + count)


@dataclass(frozen=True)
class Case:
    """A strategy, and whether steps run eagerly or inside `dx.function`."""

    kind: str
    num_replicas: int
    compiled: bool

    @property
    def strategy(self) -> Any:
        return make_strategy(self.kind, self.num_replicas)

    @property
    def single(self) -> bool:
        """Whether the strategy has one replica by construction, and ordinary variables."""
        return self.kind in ("default", "one_device", "served")

    @property
    def mirrors(self) -> bool:
        """Whether a variable has a copy on the device of each replica."""
        return self.kind in ("mirrored", "multi_worker")

    @property
    def replicas(self) -> range:
        """The numbers of the replicas that run in this process."""
        return replicas_of(self.strategy)

    @property
    def wraps(self) -> bool:
        """Whether results of replicas are wrapped."""
        return self.num_replicas > 1

    def step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a cross-replica function as this case calls it."""
        return dx.function(fn) if self.compiled else fn

    def across(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a cross-replica function once, in the strategy's scope."""
        with self.strategy.scope():
            return self.step(fn)(*args)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function once in every replica."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.strategy.run(fn, args=args, kwargs=kwargs)

        return self.step(call)(*args, **kwargs)

    def variable(self, *args: Any, **kwargs: Any) -> dx.Variable:
        """Creates a variable in the strategy's scope."""
        with self.strategy.scope():
            return dx.Variable(*args, **kwargs)

    def each(self, make: Callable[[int], Any]) -> Any:
        """Returns a value that `make` gives for each replica."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: make(context.replica_id_in_sync_group)
        )

    def split(self, batch: Any) -> Any:
        """Returns a nest of arrays, each split over the replicas in pieces of the same size."""
        return self.each(lambda index: jax.tree.map(lambda a: _piece(a, self, index), batch))

    def parts(self, value: Any) -> list[np.ndarray]:
        """Returns the replicas' parts of a result, one for each, as NumPy arrays.

        Over several workers, each contributes those of its own replicas.
        """
        parts = [np.asarray(part) for part in self.strategy.experimental_local_results(value)]
        own = parts * len(self.replicas) if len(parts) == 1 else parts
        return [part for worker in from_all_workers(own) for part in worker]

    def numbers(self, value: Any) -> list[Any]:
        """Returns the replicas' parts of a result as Python numbers or lists."""
        return [part.tolist() for part in self.parts(value)]


def _piece(array: np.ndarray, case: Case, index: int) -> jax.Array:
    size = -(-len(array) // case.num_replicas)
    return jnp.asarray(array[index * size : (index + 1) * size])


def replica_number() -> jax.Array:
    """Returns 1.0 in the first replica, 2.0 in the second, and so on."""
    context = dx.get_replica_context()
    return jnp.asarray(context.replica_id_in_sync_group, jnp.float32) + 1.0


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Asserts that two nests of numbers are the same but for rounding."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a), np.asarray(e), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
        is_leaf=lambda leaf: isinstance(leaf, (dx.DistributedValues, dx.Variable)),
    )

"""What the contract runs on: every strategy, with 1 to 4 replicas, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distribax as dx

SETUPS = [
    ("default", 1),
    ("one_device", 1),
    *(("mirrored", count) for count in (1, 2, 3, 4)),
    *(("central", count) for count in (1, 2, 3, 4)),
]
SEVERAL = [setup for setup in SETUPS if setup[1] > 1]

BATCH = np.arange(12, dtype=np.float32)
"""One global batch; it splits evenly over 1, 2, 3 and 4 replicas."""


@cache
def make_strategy(kind: str, num_replicas: int) -> Any:
    """Returns the one strategy of a kind and size that all tests share."""
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    if kind == "mirrored":
        return dx.MirroredStrategy(devices)
    if kind == "central":
        # A parameter device of its own, so that a copy that is forgotten shows.
        return dx.CentralStorageStrategy(devices, parameter_device="CPU:5")
    return dx.OneDeviceStrategy("CPU:1") if kind == "one_device" else dx.get_strategy()


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
        return self.kind in ("default", "one_device")

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

    def local(self, value: Any) -> list[np.ndarray]:
        """Returns the replicas' parts of a result, one for each, as NumPy arrays."""
        parts = [np.asarray(part) for part in self.strategy.experimental_local_results(value)]
        return parts * self.num_replicas if len(parts) == 1 else parts

    def numbers(self, value: Any) -> list[Any]:
        """Returns the replicas' parts of a result as Python numbers or lists."""
        return [part.tolist() for part in self.local(value)]


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

"""What the rules of the tower API run on: 1 or 3 (or 1 to 4) towers, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import pytest

import distribax as dx
from distribax.contrib import distribute
from distribax.topology import device_name
from tests.environment import COMPLETE

# `make contract` has all sizes.
SETUPS = [
    ("default", 1),
    ("one_device", 1),
    *(("mirrored", count) for count in ((1, 2, 3, 4) if COMPLETE else (3,))),
    ("central", 2),
]


def make_distribution(kind: str, num_towers: int) -> distribute.DistributionStrategy:
    """Returns a new strategy (but for the default one, of which there is one)."""
    devices = [f"CPU:{index}" for index in range(num_towers)]
    if kind == "mirrored":
        return distribute.MirroredStrategy(devices)
    if kind == "central":
        # Worker and parameter devices differ, so that the localities M and V(v) do.
        return distribute.DistributionStrategy(
            dx.CentralStorageStrategy(devices, parameter_device="CPU:5")
        )
    if kind == "one_device":
        return distribute.OneDeviceStrategy("CPU:1")
    return distribute.get_distribution_strategy()


@dataclass(frozen=True)
class Case:
    """A strategy, and whether cross-tower code runs inside `dx.function`."""

    kind: str
    d: distribute.DistributionStrategy
    compiled: bool

    @property
    def wraps(self) -> bool:
        """Whether results of towers are wrapped."""
        return self.d.num_towers > 1

    @property
    def ids(self) -> list[int]:
        """The towers' ids."""
        return list(range(self.d.num_towers))

    @property
    def numbers(self) -> list[float]:
        """What `tower_number` is in each tower."""
        return [index + 1.0 for index in self.ids]

    def step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a cross-tower function as this case calls it."""
        return dx.function(fn) if self.compiled else fn

    def across(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function once, in the strategy's cross-tower context."""
        with self.d.scope():
            return self.step(fn)(*args)

    def towers(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function once for each tower."""
        return self.across(lambda *args: self.d.call_for_each_tower(fn, *args), *args)

    def variable(self, value: Any, name: str = "v", **kwargs: Any) -> dx.Variable:
        """Makes a variable in the cross-tower context."""
        with self.d.scope():
            return distribute.get_variable(name, initializer=value, **kwargs)

    def unwrap(self, value: Any) -> list[float]:
        """Returns the values of all devices as numbers."""
        with self.d.scope():
            return [float(part) for part in self.d.unwrap(value)]

    def expect(self, value: Any, wrapper: type, expected: list[float]) -> None:
        """Asserts the value of each tower, and how several are wrapped."""
        assert self.unwrap(value) == pytest.approx(expected, abs=1e-6)
        if self.wraps:
            assert type(value) is wrapper


def tower() -> distribute.TowerContext:
    """Returns the context of the tower that runs now."""
    found = distribute.get_tower_context()
    assert found is not None
    return found


def tower_number() -> Any:
    """Returns 1.0 in the first tower, 2.0 in the second, and so on: a value of locality T."""
    return jnp.asarray(tower().tower_id, jnp.float32) + 1.0


def names(variable: dx.Variable) -> list[str]:
    """Returns the names of the devices that have a copy of a variable."""
    return [device_name(device) for device in variable.devices]


def devices(value: Any) -> list[Any]:
    """Returns the device of each part of a value."""
    parts = value.values if isinstance(value, dx.DistributedValues) else [value]
    return [next(iter(part.devices())) for part in parts]

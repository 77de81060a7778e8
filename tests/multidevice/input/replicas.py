"""What the tests of distributed input share: strategies, and the rows that replicas see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import distribax as dx
from distribax.topology import InputTarget, make_replica_mesh


def mirrored(replicas: int) -> dx.MirroredStrategy:
    return dx.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


STRATEGIES = {
    "default": dx.get_strategy,
    "one_device": lambda: dx.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: mirrored(2),
    "central_storage": lambda: dx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
}


def rows(strategy: Any, element: Any) -> list[list[Any]]:
    """Returns each replica's rows of one step."""
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(element)]


def flat(strategy: Any, elements: Iterable[Any]) -> list[Any]:
    """Returns the rows of all replicas and steps, in order."""
    return [row for element in elements for piece in rows(strategy, element) for row in piece]


def target(local: int, workers: int, worker: int) -> InputTarget:
    """Stands for one of several workers, each with `local` replicas, without starting them."""
    devices = tuple(jax.devices()[:local])
    return InputTarget(devices, make_replica_mesh(devices), local * workers, workers, worker)


def pieces(element: Any) -> list[Any]:
    """Returns the local pieces of a value, wrapped or not."""
    values = element.values if isinstance(element, dx.PerReplica) else [element]
    return [np.asarray(value).tolist() for value in values]

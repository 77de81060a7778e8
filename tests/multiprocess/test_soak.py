"""Half an hour of training and of clusters: memory, descriptors, threads and files stay flat.

DISTRIBAX_SOAK_SECONDS changes how long it takes, 1800 by default.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import distribax as dx

pytestmark = [pytest.mark.multiprocess, pytest.mark.soak, pytest.mark.timeout(7200)]

_SECONDS = float(os.environ.get("DISTRIBAX_SOAK_SECONDS", "1800"))
_SAMPLES = 30


def _measure() -> dict[str, float]:
    """Returns what this process and its descendants hold now."""
    own = psutil.Process()
    family = [own, *own.children(recursive=True)]
    shared = Path("/dev/shm")
    return {
        "descriptors": own.num_fds(),
        "threads": threading.active_count(),
        "processes": len(family),
        "megabytes here": own.memory_info().rss / 1e6,
        "megabytes of all": sum(each.memory_info().rss for each in family) / 1e6,
        "files in /dev/shm": len(list(shared.iterdir())) if shared.is_dir() else 0,
    }


def _check(samples: list[dict[str, float]]) -> None:
    third = len(samples) // 3
    print(f"{len(samples)} samples", flush=True)
    for name in samples[0]:
        early, late = (
            statistics.median(sample[name] for sample in part)
            for part in (samples[third : 2 * third], samples[-third:])
        )
        print(f"{name}: {early:.0f} in the middle, {late:.0f} at the end", flush=True)
        slack = 0.1 * early if "megabytes" in name else 3.0
        assert late <= early + slack, (name, [sample[name] for sample in samples])


@pytest.fixture
def coordinator() -> Iterator[dx.coordinator.ClusterCoordinator]:
    strategy = dx.ParameterServerStrategy(num_workers=2, num_ps=1, snapshot_interval=5.0)
    yield dx.coordinator.ClusterCoordinator(strategy, view="none")
    strategy.close()


def test_a_long_training_stays_flat(coordinator: dx.coordinator.ClusterCoordinator) -> None:
    strategy = coordinator.strategy
    assert isinstance(strategy, dx.Strategy)
    with strategy.scope():
        v = dx.Variable(np.zeros(1000, np.float32))

    def add() -> None:
        v.assign_add(np.ones(1000, np.float32))

    samples = []
    count = 0
    for _ in range(_SAMPLES):
        until = time.monotonic() + _SECONDS / 2 / _SAMPLES
        while time.monotonic() < until:
            for _ in range(50):
                coordinator.schedule(add)
            count += 50
            coordinator.join()
        samples.append(_measure())
    assert v.numpy()[0] >= count
    _check(samples)


def test_many_clusters_one_after_the_other_stay_flat() -> None:
    samples = []
    until = time.monotonic() + _SECONDS / 2
    while time.monotonic() < until or len(samples) < 6:
        strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1)
        try:
            coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
            assert coordinator.schedule(lambda: 1).fetch() == 1
        finally:
            strategy.close()
        samples.append(_measure())
    _check(samples)

"""One small cluster for all tests of this folder: starting Ray takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distribax as dx


@pytest.fixture(scope="session")
def strategy() -> Iterator[dx.ParameterServerStrategy]:
    """Two workers and two servers on this machine."""
    strategy = dx.ParameterServerStrategy(num_workers=2, num_ps=2, server_timeout=8.0)
    # Its threads are not those of the test that comes first.
    dx.coordinator.ClusterCoordinator(
        strategy, view="none", worker_timeout=15.0, all_workers_timeout=300.0
    )
    yield strategy
    strategy.close()


@pytest.fixture
def coordinator(strategy: dx.ParameterServerStrategy) -> dx.coordinator.ClusterCoordinator:
    """The strategy's coordinator, with nothing scheduled."""
    return dx.coordinator.ClusterCoordinator(strategy)

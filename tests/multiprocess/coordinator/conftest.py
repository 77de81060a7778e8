"""One Ray for all tests of the coordinator in a test process, and workers on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distribax.cluster.ray import engine as engines
from distribax.coordinator import ClusterCoordinator
from tests.multiprocess.coordinator.stand_in import PlainStrategy


@pytest.fixture(scope="session")
def engine() -> Iterator[engines.Engine]:
    made = engines.start_embedded(num_workers=2, num_servers=0)
    yield made
    made.close()


@pytest.fixture
def own_engine(engine: engines.Engine) -> Iterator[Callable[[int], engines.Engine]]:
    """Makes engines of the test's own, with so many workers, on the same Ray."""
    made: list[engines.Engine] = []

    def make(num_workers: int) -> engines.Engine:
        made.append(engines.start_embedded(num_workers, num_servers=0))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def coordinator(engine: engines.Engine) -> Iterator[ClusterCoordinator]:
    """Two workers that all tests share: to start them takes seconds."""
    made = ClusterCoordinator(PlainStrategy(engine), view="none", all_workers_timeout=300.0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_error_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps the error that a failed test has left from the next one."""
    yield
    if "coordinator" in request.fixturenames:
        with contextlib.suppress(Exception):
            request.getfixturevalue("coordinator").join()


@pytest.fixture
def all_up(coordinator: ClusterCoordinator) -> ClusterCoordinator:
    """The coordinator, with all its workers up."""
    wait_until(lambda: coordinator.status().num_workers_up == 2)
    return coordinator


def wait_until(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    """Waits until something is true, but not forever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)

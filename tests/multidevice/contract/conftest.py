"""Fixtures: each test of the contract runs on every strategy, number of replicas and mode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.environment import COMPLETE
from tests.multidevice.contract.cases import SETUPS, SEVERAL, Case, make_strategy
from tests.multidevice.contract.other_workers import TOGETHER

_COUNTS = (1, 2, 3, 4) if COMPLETE else (1, 3)
_MODES = {"eager": False, "compiled": True}
_STRATEGIES = {"case", "compiled_case", "scoped", "small", "several", "mirrored", "eager"}
_STRATEGIES |= {"strategy", "any_strategy", "pair"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out, among several workers, tests without one of the fixtures.

    They name the devices of one process, or have no strategy at all; that they run in a worker
    would make no difference.
    """
    if not TOGETHER:
        return
    fixtures = {item: getattr(item, "fixturenames", ()) for item in items}
    left_out = {item for item in items if not _STRATEGIES.intersection(fixtures[item])}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _servers_are_up() -> None:
    """Starts the parameter servers before the first test: their threads are not a test's."""
    if not TOGETHER:
        Case("served", 1, compiled=False).variable(0.0)


def _among(setups: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the setups to try; several workers have one, whatever its kind and size."""
    return SETUPS if TOGETHER else setups


def _named(setup: tuple[str, int]) -> str:
    return f"{setup[0]}{setup[1]}"


@pytest.fixture(params=list(_MODES))
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether steps run inside `dx.function`."""
    return _MODES[request.param]


@pytest.fixture(params=SETUPS, ids=_named)
def case(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """A strategy of each kind and size, eager and compiled."""
    return Case(*request.param, compiled)


@pytest.fixture(params=SETUPS, ids=_named)
def compiled_case(request: pytest.FixtureRequest) -> Case:
    """A strategy of each kind and size, compiled; for what eager replicas cannot do."""
    return Case(*request.param, compiled=True)


@pytest.fixture(params=[setup for setup in SETUPS if setup[0] != "default"], ids=_named)
def scoped(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """A strategy that is not the default one, eager and compiled."""
    return Case(*request.param, compiled)


@pytest.fixture(
    params=_among(
        [("one_device", 1), ("mirrored", 1), ("mirrored", 2), ("central", 2)]
        if COMPLETE
        else [("one_device", 1), ("mirrored", 3), ("central", 3)]
    ),
    ids=_named,
)
def small(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """One strategy of each kind, for rules that do not depend on the number of replicas."""
    return Case(*request.param, compiled)


@pytest.fixture(params=SEVERAL, ids=_named)
def several(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """A strategy with more than one replica, eager and compiled."""
    return Case(*request.param, compiled)


@pytest.fixture(
    params=_among(
        [("mirrored", count) for count in _COUNTS if count > 1]
        + [("central", 2 if COMPLETE else 3)]
    ),
    ids=_named,
)
def eager(request: pytest.FixtureRequest) -> Case:
    """A strategy with more than one replica, for what compiled replicas cannot do."""
    return Case(*request.param, compiled=False)


@pytest.fixture(params=SETUPS, ids=_named)
def strategy(request: pytest.FixtureRequest) -> Any:
    """A strategy of each kind and size."""
    return make_strategy(*request.param)


@pytest.fixture(params=_among([("mirrored", count) for count in _COUNTS]), ids=_named)
def mirrored(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """Mirrored strategies of several sizes, for what is slow to try on all kinds."""
    return Case(*request.param, compiled)


@pytest.fixture(params=_among([("default", 1), ("mirrored", 2)]), ids=_named)
def any_strategy(request: pytest.FixtureRequest) -> Any:
    """One strategy with one replica and one with several, for rules of `dx.function` alone."""
    return make_strategy(*request.param)


@pytest.fixture(params=_among([("mirrored", 2)]), ids=_named)
def pair(request: pytest.FixtureRequest) -> Any:
    """A mirrored strategy of two replicas, for what does not depend on kind and size."""
    return make_strategy(*request.param)

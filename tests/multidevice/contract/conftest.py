"""Fixtures: each test of the contract runs on every strategy, number of replicas and mode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multidevice.contract.cases import SETUPS, SEVERAL, Case, make_strategy

_MODES = {"eager": False, "compiled": True}


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
    params=[("one_device", 1), ("mirrored", 1), ("mirrored", 2), ("central", 2)], ids=_named
)
def small(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """One strategy of each kind, for rules that do not depend on the number of replicas."""
    return Case(*request.param, compiled)


@pytest.fixture(params=SEVERAL, ids=_named)
def several(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """A strategy with more than one replica, eager and compiled."""
    return Case(*request.param, compiled)


@pytest.fixture(params=SETUPS, ids=_named)
def strategy(request: pytest.FixtureRequest) -> Any:
    """A strategy of each kind and size."""
    return make_strategy(*request.param)


@pytest.fixture(params=[1, 2, 3, 4])
def mirrored(request: pytest.FixtureRequest, compiled: bool) -> Case:
    """Mirrored strategies of all sizes, for what is slow to try on all kinds."""
    return Case("mirrored", request.param, compiled)


@pytest.fixture(params=[("default", 1), ("mirrored", 2)], ids=_named)
def any_strategy(request: pytest.FixtureRequest) -> Any:
    """One strategy with one replica and one with several, for rules of `dx.function` alone."""
    return make_strategy(*request.param)


@pytest.fixture
def pair() -> Any:
    """A mirrored strategy of two replicas, for what does not depend on kind and size."""
    return make_strategy("mirrored", 2)

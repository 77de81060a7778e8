"""Fixtures: each rule of the tower API runs on every strategy, number of towers and mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distribax.contrib import distribute
from tests.multidevice.tower_api.cases import SETUPS, Case, make_distribution


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether cross-tower code runs inside `dx.function`."""
    return request.param == "compiled"


def _named(setup: tuple[str, int]) -> str:
    return f"{setup[0]}{setup[1]}"


@pytest.fixture(params=SETUPS, ids=_named)
def case(request: pytest.FixtureRequest, compiled: bool) -> Iterator[Case]:
    """A strategy of each kind and size, eager and compiled."""
    yield from _case(*request.param, compiled)


@pytest.fixture(params=[("default", 1), ("one_device", 1), ("mirrored", 2)], ids=_named)
def small(request: pytest.FixtureRequest, compiled: bool) -> Iterator[Case]:
    """One strategy of each kind, for rules that do not depend on the number of towers."""
    yield from _case(*request.param, compiled)


def _case(kind: str, num_towers: int, compiled: bool) -> Iterator[Case]:
    made = Case(kind, make_distribution(kind, num_towers), compiled)
    yield made
    with made.d.scope():
        # The default strategy outlives the test.
        distribute.reset_variable_store()


@pytest.fixture
def pair() -> distribute.MirroredStrategy:
    """Two towers, for what does not depend on kind and number."""
    return distribute.MirroredStrategy(["CPU:0", "CPU:1"])

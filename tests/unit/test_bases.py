"""Bases that others build on say that they are bases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distribax.execution import LiftedIterator
from distribax.values import ArrayLike
from distribax.variables import Placement

USES: dict[str, Callable[[], object]] = {
    "ArrayLike": lambda: ArrayLike().__jax_array__(),
    "LiftedIterator": lambda: LiftedIterator().fetch(),
    "Placement.devices": lambda: Placement().devices,
    "Placement.store": lambda: Placement().store(1.0),
}


@pytest.mark.parametrize("name", USES)
def test_a_base_does_nothing_by_itself(name: str) -> None:
    with pytest.raises(NotImplementedError):
        USES[name]()

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
}


@pytest.mark.parametrize("name", USES)
def test_a_base_says_what_is_missing(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=rf"{name} does not say.*: (define|override) \w+\("
    ):
        USES[name]()


def test_a_placement_says_where_it_is() -> None:
    with pytest.raises(TypeError, match=r"abstract.*devices.*store"):
        Placement()  # type: ignore[abstract]

"""Which values a checkpoint keeps, and for which variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx


def test_values_that_another_type_cannot_hold(tmp_path: Path) -> None:
    fraction = dx.Variable([0.5, 1.5])
    path = dx.Checkpoint(v=fraction, n=2).write(tmp_path / "fraction")
    for dtype in (np.int32, bool):
        other = dx.Variable(np.ones(2), dtype=dtype, name="w")
        with pytest.raises(ValueError, match=r"'v' was saved with .*float32.*variable 'w'.*dtype="):
            dx.Checkpoint(v=other).read(path)
        assert other.numpy().tolist() == [1, 1]
    short = dx.Variable(jnp.zeros(2, jnp.bfloat16))
    dx.Checkpoint(v=short).read(path)
    assert short.numpy().tolist() == [0.5, 1.5]


def test_numbers_keep_their_fraction(tmp_path: Path) -> None:
    path = dx.Checkpoint(state={"rate": 0.5, "step": 3}).write(tmp_path / "numbers")
    state: dict[str, Any] = {"rate": 1, "step": 0.0}
    dx.Checkpoint(state=state).read(path)
    assert state == {"rate": 0.5, "step": 3.0}
    assert [type(value) for value in state.values()] == [float, float]


def test_a_value_without_elements_is_refused(tmp_path: Path) -> None:
    checkpoint = dx.Checkpoint(rows=dx.Variable(np.zeros((0, 4))))
    with pytest.raises(ValueError, match=r"the value 'rows' has shape \(0, 4\).*leave it out"):
        checkpoint.write(tmp_path / "empty")
    assert not list(tmp_path.iterdir())

"""`dx.Checkpoint(root)`: the parts of one object, under their own names."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

import distribax as dx


class _Network:
    """As users write them: with settings and functions beside the variables."""

    def __init__(self) -> None:
        self.name, self.activation, self.rate = "network", jnp.tanh, 0.5
        self.layers = [dx.Variable([1.0, 2.0])]


def test_parts_of_a_root_have_their_own_names(tmp_path: Path) -> None:
    network, mean = _Network(), dx.metrics.Mean()
    mean.update_state([1.0, 2.0])
    saved = dx.Checkpoint(network, mean=mean).save(tmp_path / "network")
    assert [name for name, _ in dx.train.list_variables(saved)] == [
        "layers.0",
        "mean.0",
        "mean.1",
        "rate",
        "save_counter",
    ]
    other = _Network()
    other.rate = 0.1
    other.layers[0].assign([0.0, 0.0])
    dx.Checkpoint(other, mean=mean).restore(saved).assert_consumed()
    assert (other.rate, other.layers[0].numpy().tolist()) == (0.5, [1.0, 2.0])

    new = dx.metrics.Mean()
    dx.Checkpoint(new).restore(dx.Checkpoint(mean).save(tmp_path / "mean")).assert_consumed()
    assert float(new.result()) == 1.5


def test_roots_without_parts_or_places(tmp_path: Path) -> None:
    for root in (dx.Variable(1.0), 3.0, jnp.ones(2)):
        with pytest.raises(TypeError, match=r"the root is a .*, which has no parts"):
            dx.Checkpoint(root)
    with pytest.raises(TypeError, match="the root is a function, which cannot be saved"):
        dx.Checkpoint(jnp.sum)
    checkpoint = dx.Checkpoint((1.0, 2.0))
    path = checkpoint.save(tmp_path / "tuple")
    with pytest.raises(TypeError, match="the root is a tuple, which cannot be changed"):
        checkpoint.restore(path)

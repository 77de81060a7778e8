"""Hyperparameters: what can be read and set, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import distribax as dx
from distribax.testing import local_servers


def test_transformation_with_fixed_numbers_has_none():
    optimizer = dx.Optimizer(optax.adam(1e-3))
    assert optimizer.hyperparameters == {}
    assert not hasattr(optimizer, "learning_rate")
    with pytest.raises(AttributeError, match="Pass the function that makes it"):
        _ = optimizer.learning_rate


@pytest.mark.parametrize(
    ("transformation", "arguments", "message"),
    [
        (5, {}, "is not an optax transformation"),
        (optax.adam(1e-3), {"learning_rate": 0.1}, "made already"),
        (optax.adam, {"learning_speed": 0.1}, "learning_rate"),
    ],
)
def test_wrong_arguments_are_refused(transformation, arguments, message):
    with pytest.raises(TypeError, match=message):
        dx.Optimizer(transformation, **arguments)


def test_injected_numbers_are_found_wherever_they_are():
    def make(learning_rate, clip):
        return optax.chain(optax.clip(clip), optax.sgd(learning_rate))

    inner = optax.inject_hyperparams(optax.scale)(step_size=2.0)
    outer = optax.chain(inner, optax.inject_hyperparams(make)(learning_rate=0.5, clip=1.0))
    w = dx.Variable(0.0)
    optimizer = dx.Optimizer(outer, gradient_accumulation_steps=2)
    assert {k: float(v) for k, v in optimizer.hyperparameters.items()} == {
        "step_size": 2.0,
        "learning_rate": 0.5,
        "clip": 1.0,
    }
    optimizer.hyperparameters["clip"].assign(4.0)
    for _ in range(2):
        optimizer.apply_gradients([(3.0, w)])
    assert float(w) == -2.0
    twice = dx.Optimizer(optax.chain(*(optax.inject_hyperparams(optax.sgd)(v) for v in (1.0, 2.0))))
    assert [float(v) for v in twice.hyperparameters.values()] == [1.0, 2.0]


def test_change_needs_no_new_trace_and_takes_part_in_checkpoints():
    w = dx.Variable(jnp.zeros(2, jnp.bfloat16))
    optimizer = dx.Optimizer(optax.sgd, learning_rate=1.0)
    early = optimizer.learning_rate
    step = dx.function(lambda: optimizer.apply_gradients([(jnp.ones(2), w)]))
    early.assign(0.5)
    step()
    # The variables' data type is known now.
    assert optimizer.learning_rate.dtype == jnp.bfloat16 and float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate.assign(0.25)
    step()
    assert step.trace_count == 1 and w.numpy().tolist() == [-0.75, -0.75]
    assert "Optimizer/learning_rate:0" in [v.name for v in optimizer.variables]


@pytest.mark.parametrize("compiled", [False, True])
def test_servers_hold_it(compiled):
    with local_servers(2) as strategy:
        with strategy.scope():
            variables = [dx.Variable(jnp.zeros(2), name=name) for name in "ab"]
            optimizer = dx.Optimizer(optax.sgd, learning_rate=1.0)
            optimizer.learning_rate = 0.5

        def step():
            optimizer.apply_gradients([(jnp.ones(2), v) for v in variables])

        run = dx.function(step) if compiled else step
        for rate, expected in ((0.5, -0.5), (2.0, -2.5)):
            optimizer.learning_rate = rate
            with strategy.scope():
                run()
            assert [v.numpy().tolist() for v in variables] == [[expected] * 2] * 2
            assert float(optimizer.learning_rate) == rate


def test_sparse_gradients_go_through_every_transformation():
    table = dx.Variable(jnp.ones((4, 2)))
    optimizer = dx.Optimizer(optax.adamw, learning_rate=0.1)
    rows = dx.IndexedSlices(jnp.ones((2, 2)), jnp.asarray([1, 1]), (4, 2))
    dense = jnp.zeros((4, 2)).at[1].set(2.0)
    reference = optax.adamw(0.1)
    state, value = reference.init([table.value()]), [table.value()]
    for _ in range(2):
        optimizer.apply_gradients([(rows, table)])
        updates, state = reference.update([dense], state, value)
        value = optax.apply_updates(value, updates)
    assert jnp.allclose(table.value(), value[0], atol=1e-6)
    assert jax.tree.leaves(state)[0] == 2

"""Keras's layers, losses, metrics and optimizers in loops of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import INPUTS, LABELS, STRATEGIES, make

NUM_STEPS, BATCH_SIZE = 3, 12
BATCHES = [
    (INPUTS[i * BATCH_SIZE :][:BATCH_SIZE], LABELS[i * BATCH_SIZE :][:BATCH_SIZE])
    for i in range(NUM_STEPS)
]


def make_layers() -> keras.Model:
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
    )


def make_loss() -> keras.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_adam() -> keras.Optimizer:
    return keras.optimizers.Adam(0.01)


def make_sgd() -> keras.Optimizer:
    return keras.optimizers.SGD(0.1)


@cache
def train_plainly(make_optimizer: Callable[[], Any]) -> tuple[list[Any], list[float], float]:
    """Trains with Keras alone, on one device."""
    model = make(None, make_layers)
    optimizer, accuracy = make_optimizer(), keras.metrics.SparseCategoricalAccuracy()
    optimizer.build(model.trainable_variables)
    losses = []

    def compute(trainable: Any, x: Any, y: Any) -> Any:
        logits, _ = model.stateless_call(trainable, [], x)
        return make_loss()(y, logits), logits

    for x, y in BATCHES:
        values = [v.value for v in model.trainable_variables]
        (loss, logits), grads = jax.value_and_grad(compute, has_aux=True)(values, x, y)
        optimizer.apply(grads, model.trainable_variables)
        accuracy.update_state(y, logits)
        losses.append(float(loss))
    return model.get_weights(), losses, float(accuracy.result())


def train(
    strategy: dx.Strategy, make_optimizer: Callable[[], Any], compiled: bool
) -> tuple[list[Any], list[float], float]:
    """Trains as TensorFlow's tutorial of custom training does."""
    model = make(strategy, make_layers)
    with strategy.scope():
        optimizer, accuracy = make_optimizer(), keras.metrics.SparseCategoricalAccuracy()
        loss_object = make_loss()

    def step(batch: Any) -> Any:
        x, y = batch

        def compute() -> Any:
            logits = model(x, training=True)
            return loss_object(y, logits), logits

        variables = model.trainable_variables
        (loss, logits), grads = dx.value_and_grad(compute, variables, has_aux=True)()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        accuracy.update_state(y, logits)
        return loss

    def distributed_step(batch: Any) -> Any:
        return strategy.reduce(dx.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)

    run = dx.function(distributed_step) if compiled else distributed_step
    dataset = strategy.experimental_distribute_dataset(iter(BATCHES))
    losses = [float(run(batch)) for batch in dataset]
    return model.get_weights(), losses, float(accuracy.result())


def check(ours: Any, plain: Any) -> None:
    np.testing.assert_allclose(ours[1], plain[1], rtol=1e-5)
    assert ours[2] == pytest.approx(plain[2])
    for a, b in zip(ours[0], plain[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param("mirrored2", True, id="mirrored2-compiled"),
        pytest.param("mirrored2", False, id="mirrored2-eager"),
        pytest.param("one_device", True, id="one_device-compiled"),
        pytest.param("central2", False, id="central2-eager"),
        # Mirrored replicas go both ways, and these two strategies the same ones.
        pytest.param("one_device", False, id="one_device-eager", marks=pytest.mark.thorough),
        pytest.param("central2", True, id="central2-compiled", marks=pytest.mark.thorough),
    ],
)
def test_loop_learns_the_same_as_keras_alone(name: str, compiled: bool) -> None:
    ours = train(STRATEGIES[name](), make_adam, compiled)

    check(ours, train_plainly(make_adam))


def make_scaled() -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1.0)


@pytest.mark.parametrize(
    "name", [pytest.param("one_device", marks=pytest.mark.thorough), "mirrored2"]
)
def test_scaled_optimizer_takes_one_branch_in_all_replicas(name: str) -> None:
    ours = train(STRATEGIES[name](), make_scaled, compiled=True)

    # Alone, it cannot be applied to variables on JAX at all.
    check(ours, train_plainly(make_sgd))


# The eager one computes the gradients as the loop above does, and updates as the test below.
@pytest.mark.parametrize(
    "compiled", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["compiled", "eager"]
)
def test_optax_updates_a_keras_model(compiled: bool) -> None:
    ours = train(STRATEGIES["mirrored2"](), lambda: dx.Optimizer(optax.sgd(0.1)), compiled)

    check(ours, train_plainly(make_sgd))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_keras_optimizer_updates_our_variables(compiled: bool) -> None:
    strategy = STRATEGIES["mirrored2"]()
    with strategy.scope():
        w = dx.Variable([1.0, 2.0], name="w")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def step(x: Any) -> None:
        _, grad = dx.value_and_grad(lambda: jnp.sum(w * x), w)()
        optimizer.apply([grad], [w])

    def run(x: Any) -> None:
        strategy.run(step, args=(x,))

    parts = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group + 1)
    )
    for _ in range(2):
        (dx.function(run) if compiled else run)(parts)

    # The gradients add up to 3; then momentum makes it 3 * 1.9.
    np.testing.assert_allclose(w.numpy(), [1.0 - 0.87, 2.0 - 0.87], rtol=1e-5)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_layers_are_built_by_their_first_step(compiled: bool) -> None:
    strategy = STRATEGIES["mirrored2"]()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layer = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=2))

    def run(batch: Any) -> Any:
        return strategy.run(layer, args=(batch,))

    step = dx.function(run) if compiled else run
    (batch,) = strategy.experimental_distribute_dataset(iter([INPUTS[:4]]))
    result = strategy.gather(step(batch), axis=0)

    kernel = keras.initializers.GlorotUniform(seed=2)((5, 3))
    np.testing.assert_allclose(layer.kernel.numpy(), kernel, rtol=1e-6)
    np.testing.assert_allclose(result, INPUTS[:4] @ kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(strategy.gather(step(batch), axis=0), result, rtol=1e-6)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_state_is_restored_before_it_exists(compiled: bool, tmp_path: Path) -> None:
    strategy = STRATEGIES["mirrored2"]()

    def make_all() -> tuple[keras.Model, keras.Optimizer, dx.Checkpoint]:
        model = make(strategy, lambda: keras.Sequential([keras.layers.Dense(3)]))
        with strategy.scope():
            optimizer = make_adam()
        return model, optimizer, dx.Checkpoint(model=model, optimizer=optimizer)

    def train_step(model: keras.Model, optimizer: keras.Optimizer) -> None:
        with strategy.scope():
            model.build((None, 5))

        def replica() -> None:
            variables = model.trainable_variables
            _, grads = dx.value_and_grad(lambda: jnp.sum(model(INPUTS[:4]) ** 2), variables)()
            optimizer.apply_gradients(zip(grads, variables, strict=True))

        run = lambda: strategy.run(replica)  # noqa: E731
        (dx.function(run) if compiled else run)()

    model, optimizer, checkpoint = make_all()
    train_step(model, optimizer)
    path = checkpoint.save(tmp_path / "early")
    train_step(model, optimizer)

    new, new_optimizer, late = make_all()
    status = late.restore(path)
    train_step(new, new_optimizer)
    status.assert_consumed()
    for one, other in zip(new.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)

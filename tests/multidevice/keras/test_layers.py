"""Layers whose replicas differ: normalization and dropout; and what is random repeats."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import (
    INPUTS,
    LABELS,
    STRATEGIES,
    check_same,
    compile_classifier,
    make,
    make_pair,
    train,
)
from tests.multidevice.keras.features import (
    check_features,
    train_alone,
    train_features,
    train_random,
)

FOUR = STRATEGIES["mirrored3"]


def make_normalized(layer: Any, **settings: Any) -> Any:
    def make_model() -> keras.Model:
        layers = [keras.Input((5,)), keras.layers.Dense(4), layer(**settings)]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        compile_classifier(model, optimizer=keras.optimizers.SGD(0.05))
        return model

    return make_model


def test_synchronized_normalization_is_that_of_one_device() -> None:
    layer = dx.integrations.keras.SyncBatchNormalization

    # The last batch is uneven, and one of it is smaller than the number of replicas.
    ours = train(FOUR(), make_normalized(layer, momentum=0.8), INPUTS[:37], LABELS[:37])

    plain = make_normalized(keras.layers.BatchNormalization, momentum=0.8)
    check_same(ours, train(None, plain, INPUTS[:37], LABELS[:37]))


def test_keras_own_argument_is_refused() -> None:
    with make_pair().scope(), pytest.raises(ValueError, match="SyncBatchNormalization"):
        keras.layers.BatchNormalization(synchronized=True)


def test_synchronized_normalization_counts_what_is_not_masked() -> None:
    strategy = make_pair()
    inputs = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
    with strategy.scope():
        layer = dx.integrations.keras.SyncBatchNormalization(momentum=0.0)
        layer.build(inputs.shape)
    dataset = strategy.experimental_distribute_dataset(iter([(inputs, mask)]))

    for batch in dataset:
        strategy.run(lambda x, m: layer(x, training=True, mask=m), args=batch)

    np.testing.assert_allclose(layer.moving_mean.numpy(), inputs[mask].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), inputs[mask].var(axis=0), rtol=1e-5)


def test_replicas_normalize_by_their_own_examples() -> None:
    strategy = make_pair()
    inputs = np.array([[1.0], [3.0], [10.0], [30.0]], np.float32)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, epsilon=1e-9)
        layer.build(inputs.shape)
    dataset = strategy.experimental_distribute_dataset(iter([(inputs,)]))

    @dx.function
    def step(batch: Any) -> Any:
        return strategy.run(lambda x: layer(x, training=True), args=batch)

    for batch in dataset:
        normalized = strategy.gather(step(batch), axis=0)

    np.testing.assert_allclose(np.ravel(normalized), [-1, 1, -1, 1], rtol=1e-5)
    # The moving statistics are averages of what the replicas have found.
    np.testing.assert_allclose(layer.moving_mean.numpy(), [(2 + 20) / 2], rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), [(1 + 100) / 2], rtol=1e-5)


def test_empty_pieces_do_not_count_in_statistics() -> None:
    make_model = make_normalized(keras.layers.BatchNormalization)
    model = make(FOUR(), make_model)

    model.fit(INPUTS[:2], LABELS[:2], epochs=1, verbose=0)

    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_dropout_differs_by_replica_and_repeats(compiled: bool) -> None:
    def drop(strategy: dx.Strategy) -> np.ndarray:
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)

        def step() -> Any:
            return strategy.run(lambda: layer(jnp.ones((1, 32)), training=True))

        run = dx.function(step) if compiled else step
        results = [strategy.experimental_local_results(run()) for _ in range(2)]
        return np.stack([np.concatenate(result) for result in results])

    three, again = drop(FOUR()), drop(FOUR())
    alone = drop(dx.OneDeviceStrategy("CPU:0"))

    np.testing.assert_array_equal(three, again)
    np.testing.assert_array_equal(three[:, :1], alone)
    assert len({row.tobytes() for row in three.reshape(-1, 32)}) == 6
    plain = keras.layers.Dropout(0.5, seed=3)
    np.testing.assert_array_equal(plain(jnp.ones((1, 32)), training=True), alone[0])


def test_training_with_dropout_repeats() -> None:
    def make_model() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        )
        compile_classifier(model)
        return model

    first, second = (train(make_pair(), make_model, epochs=2) for _ in range(2))

    check_same(first, second, tolerance=0)


def test_overflow_in_one_replica_is_seen_by_all() -> None:
    def make_model() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        inner = keras.optimizers.SGD(0.1)
        compile_classifier(model, optimizer=keras.optimizers.LossScaleOptimizer(inner, 4.0))
        return model

    inputs = INPUTS[:12].copy()
    inputs[-1] = np.inf
    model = make(make_pair(), make_model)
    before = model.get_weights()

    model.fit(inputs, LABELS[:12], batch_size=12, epochs=1, verbose=0)

    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0


def test_layers_and_optimizers_are_alike_under_all_strategies() -> None:
    alone = train_alone()

    check_features(train_features(STRATEGIES["one_device"]()), alone, alone["random"])
    check_features(train_features(STRATEGIES["central2"]()), alone, train_random(make_pair()))

"""Every kind of input that Keras takes, and our data sets, feed replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import keras
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.keras.comparison import (
    BATCH_SIZE,
    INPUTS,
    LABELS,
    STRATEGIES,
    Trained,
    check_same,
    make,
    make_classifier,
    make_pair,
    train,
)

BATCHES = [
    (INPUTS[start : start + BATCH_SIZE], LABELS[start : start + BATCH_SIZE])
    for start in range(0, len(INPUTS), BATCH_SIZE)
]


class Batches(keras.utils.PyDataset):
    """The batches as Keras's own kind of data set."""

    def __len__(self) -> int:
        return len(BATCHES)

    def __getitem__(self, index: int) -> Any:
        return BATCHES[index]


def repeat() -> Iterator[Any]:
    while True:
        yield from BATCHES


def make_loader() -> Any:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(INPUTS), torch.tensor(LABELS))
    return torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE)


def make_dataset() -> dx.data.Dataset:
    return dx.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(BATCH_SIZE)


@cache
def fit_plainly() -> Trained:
    """Returns what all kinds of input are compared with."""
    return train(None, make_classifier, shuffle=False)


@pytest.mark.parametrize(
    ("make_input", "settings"),
    [
        (repeat, {"steps_per_epoch": len(BATCHES)}),
        (lambda: Batches(), {}),
        (make_loader, {}),
        (make_dataset, {}),
        (lambda: make_dataset().repeat(), {"steps_per_epoch": len(BATCHES)}),
    ],
    ids=["generator", "py_dataset", "torch", "dataset", "repeated"],
)
def test_input_is_divided(make_input: Callable[[], Any], settings: dict[str, Any]) -> None:
    ours = train(make_pair(), make_classifier, make_input(), None, shuffle=False, **settings)

    check_same(ours, fit_plainly())


def test_dataset_feeds_a_model_without_a_strategy() -> None:
    """Beside models of strategies, to compare them, or after a model was saved and loaded."""
    make(make_pair(), make_classifier)
    alone = train(None, make_classifier, make_dataset(), None, validation_data=make_dataset())

    check_same(alone, train(None, make_classifier, shuffle=False, validation_data=(INPUTS, LABELS)))
    np.testing.assert_allclose(
        alone.model.predict(make_dataset(), verbose=0),
        alone.model.predict(INPUTS, verbose=0),
        rtol=1e-5,
        atol=1e-5,
    )


def test_tensorflow_feeds_replicas_and_writes_logs(tmp_path: Path) -> None:
    with patch.dict(os.environ):
        # It sets variables of the environment.
        tensorflow = pytest.importorskip("tensorflow", reason="tf.data needs TensorFlow")
    data = tensorflow.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(BATCH_SIZE)
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)
    settings = {"shuffle": False, "validation_data": data, "callbacks": [board]}

    ours = train(make_pair(), make_classifier, data, None, **settings)

    plain = train(None, make_classifier, shuffle=False, validation_data=(INPUTS, LABELS))
    check_same(ours, plain)
    predicted, expected = (
        ours.model.predict(data, verbose=0),
        plain.model.predict(INPUTS, verbose=0),
    )
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)
    assert {path.parent.name for path in tmp_path.rglob("events.*")} == {"train", "validation"}


@pytest.mark.parametrize("name", ["one_device", "mirrored2"])
def test_distributed_dataset_is_taken_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # There Keras itself would put whole batches on the first device.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    strategy = STRATEGIES[name]()
    dataset = strategy.experimental_distribute_dataset(make_dataset())

    def make_lazy() -> keras.Model:
        model = keras.Sequential([keras.layers.Dense(6, "tanh", kernel_regularizer="l2")])
        model.add(keras.layers.Dense(3))
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    ours = train(strategy, make_lazy, dataset, None, validation_data=make_dataset())

    plain = train(None, make_lazy, shuffle=False, validation_data=(INPUTS, LABELS))
    check_same(ours, plain)
    predicted = ours.model.predict(dataset, verbose=0)
    np.testing.assert_allclose(
        predicted, plain.model.predict(INPUTS, verbose=0), rtol=1e-5, atol=1e-5
    )


def test_classes_are_weighed_in_a_dataset() -> None:
    weights = {0: 0.3, 2: 2.0}

    ours = train(make_pair(), make_classifier, make_dataset(), None, class_weight=weights)

    plain = train(None, make_classifier, shuffle=False, class_weight={**weights, 1: 1.0})
    check_same(ours, plain)


def test_batches_are_trained_one_by_one() -> None:
    ours, plain = (make(strategy, make_classifier) for strategy in (make_pair(), None))
    for x, y in BATCHES:
        np.testing.assert_allclose(
            ours.train_on_batch(x, y), plain.train_on_batch(x, y), rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(
        ours.test_on_batch(*BATCHES[0]), plain.test_on_batch(*BATCHES[0]), rtol=1e-5
    )
    np.testing.assert_allclose(
        ours.predict_on_batch(INPUTS[:5]), plain.predict_on_batch(INPUTS[:5]), rtol=1e-5, atol=1e-6
    )


def test_batch_smaller_than_the_number_of_replicas() -> None:
    strategy = STRATEGIES["mirrored3"]()

    ours = train(strategy, make_classifier, INPUTS[:7], LABELS[:7], batch_size=2)

    check_same(ours, train(None, make_classifier, INPUTS[:7], LABELS[:7], batch_size=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"y": LABELS}, "y was given beside a data set"),
        ({"sample_weight": LABELS}, "sample_weight was given beside a data set"),
    ],
)
def test_targets_beside_a_dataset_are_refused(settings: dict[str, Any], message: str) -> None:
    model = make(make_pair(), make_classifier)

    with pytest.raises(ValueError, match=message):
        model.fit(make_dataset(), **settings)


def test_two_kinds_of_weights_are_refused() -> None:
    model = make(make_pair(), make_classifier)
    dataset = dx.data.Dataset.from_tensor_slices((INPUTS, LABELS, np.ones(len(LABELS)))).batch(4)

    with pytest.raises(ValueError, match="batches have sample weights already"):
        model.fit(dataset, class_weight={0: 2.0}, verbose=0)


def test_weights_of_divided_batches_are_refused() -> None:
    strategy = make_pair()
    model = make(strategy, make_classifier)
    dataset = strategy.experimental_distribute_dataset(make_dataset())

    with pytest.raises(ValueError, match="class_weight was given beside a DistributedDataset"):
        model.fit(dataset, class_weight={0: 2.0})


def test_batch_that_cannot_be_divided_is_refused() -> None:
    model = make(make_pair(), make_classifier)
    # Keras itself finds the mistake while it builds metrics.
    model.fit(INPUTS[:4], LABELS[:4], verbose=0)

    def generate() -> Iterator[Any]:
        while True:
            yield INPUTS[:4], LABELS[:3]

    with pytest.raises(ValueError, match="cannot be divided among replicas"):
        model.fit(generate(), steps_per_epoch=1, shuffle=False, verbose=0)

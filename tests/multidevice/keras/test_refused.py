"""What would not be distributed is refused, with words that say what to do."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

import distribax as dx
from tests.conftest import RunFresh
from tests.multidevice.keras.comparison import INPUTS, LABELS, make, make_classifier, make_pair


def test_model_made_outside_is_refused_in_a_scope() -> None:
    model = make(None, make_classifier)

    with make_pair().scope(), pytest.raises(ValueError, match="made outside `with strategy"):
        model.fit(INPUTS, LABELS)


def test_model_with_weights_from_outside_is_refused() -> None:
    layer = keras.layers.Dense(3)
    layer.build((None, 5))

    def make_model() -> keras.Model:
        return keras.Sequential([keras.Input((5,)), layer])

    model = make(make_pair(), make_model)

    with pytest.raises(ValueError, match=r"its variable '.*' was made outside"):
        model.predict(INPUTS)


def test_model_of_another_strategy_is_refused() -> None:
    model = make(make_pair(), make_classifier)

    with make_pair().scope(), pytest.raises(ValueError, match="belongs to two strategies"):
        model.evaluate(INPUTS, LABELS)


def test_state_of_examples_is_refused() -> None:
    def make_model() -> keras.Model:
        layers = [keras.Input(batch_shape=(4, 5, 1)), keras.layers.GRU(3, stateful=True)]
        return keras.Sequential(layers)

    model = make(make_pair(), make_model)

    with pytest.raises(ValueError, match=r"'gru.*' has stateful=True.* dx.OneDeviceStrategy"):
        model.predict(INPUTS[:4])


def test_model_outside_of_strategies_is_keras_alone() -> None:
    model = make(None, make_classifier)
    model.fit(INPUTS, LABELS, epochs=1, verbose=0)

    assert not isinstance(model.train_function, type(make_pair()))


REFUSED = """
import {first}
import {second}
{change}
strategy = distribax.OneDeviceStrategy("CPU:0")
outside = keras.Variable([1.0])
with strategy.scope():
    try:
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    except distribax.errors.UnsupportedKerasError as error:
        print(error)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("environment", "change", "message"),
    [
        ({"KERAS_BACKEND": "numpy"}, "", "KERAS_BACKEND=jax"),
        ({"KERAS_NNX_ENABLED": "1"}, "", "KERAS_NNX_ENABLED"),
        ({}, "keras.__version__ = '3.6.0'", "Keras 3.6.0 is too old"),
        ({}, "del keras.layers.BatchNormalization._moments", "lacks what strategies need"),
    ],
    ids=["backend", "nnx", "version", "names"],
)
def test_keras_that_cannot_be_distributed_is_refused(
    run_forked: RunFresh, environment: dict[str, str], change: str, message: str
) -> None:
    program = REFUSED.format(first="distribax", second="keras", change=change)

    assert message in run_forked(program, **environment)


@pytest.mark.multiprocess
@pytest.mark.parametrize("written", [None, '{"backend": "tensorflow"}', '{"floatx": "float32"}'])
def test_keras_runs_on_jax_if_nothing_is_said(
    run_forked: RunFresh, tmp_path: Path, written: str | None
) -> None:
    if written is not None:
        (tmp_path / "keras.json").write_text(written)
    out = run_forked(
        """
        import os
        del os.environ["KERAS_BACKEND"]
        import distribax as dx
        dx.set_virtual_cpu_devices(2)
        strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            import keras
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0)
        print(keras.config.backend(), "KERAS_BACKEND" in os.environ)
        print(len(dx.integrations.keras.SyncBatchNormalization.__name__))
        import importlib.resources
        print((importlib.resources.files("keras") / "__init__.py").is_file())
        """,
        KERAS_HOME=str(tmp_path),
    )

    lines = out.splitlines()
    assert (lines[0], lines[-1]) == ("jax False", "True")


@pytest.mark.multiprocess
def test_keras_variables_are_known_before_any_scope_or_step(run_forked: RunFresh) -> None:
    out = run_forked(
        """
        import keras
        import optax
        import distribax as dx
        v = keras.Variable(3.0)
        loss, grad = dx.value_and_grad(lambda: v * v, v)()
        dx.Optimizer(optax.sgd(0.5)).apply_gradients([(grad, v)])
        print(float(loss), float(grad), float(v.value))
        """
    )
    assert out.splitlines()[-1] == "9.0 6.0 0.0"


def test_integrations_name_what_there_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        dx.integrations.unknown  # noqa: B018

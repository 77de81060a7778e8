"""The private names of Keras that are needed, checked before anything is replaced."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import keras

from distribax.errors import UnsupportedKerasError


@dataclass(frozen=True)
class PrivateNames:
    """The private classes and modules of Keras that are used.

    Attributes:
        trainer: The class that gives `keras.Model` its loops.
        losses: The module with the functions that reduce losses.
        data_adapter: The base class of what feeds a loop.
        epoch_iterator: The class of what a loop takes its batches from.
    """

    trainer: Any
    losses: Any
    data_adapter: Any
    epoch_iterator: Any


def find_private_names() -> PrivateNames:
    """Returns the names, after checking that each does what is expected.

    Raises:
        UnsupportedKerasError: One is missing, or does something else.
    """
    try:
        module: Any = importlib.import_module("keras.src.backend.jax.trainer")
        trainer, epoch_iterator = module.JAXTrainer, module.JAXEpochIterator
        losses: Any = importlib.import_module("keras.src.losses.loss")
        adapters: Any = importlib.import_module("keras.src.trainers.data_adapters.data_adapter")
        for owner, name in (
            (losses, "scale_loss_for_distribution"),
            (losses, "unscale_loss_for_distribution"),
            (losses, "reduce_values"),
            (losses, "apply_mask"),
            (trainer, "_get_jax_state"),
            (trainer, "_symbolic_build"),
            (epoch_iterator, "_get_iterator"),
            (adapters.DataAdapter, "get_jax_iterator"),
            (keras.layers.BatchNormalization, "_moments"),
        ):
            getattr(owner, name)
        _check_behaviour(trainer)
        return PrivateNames(trainer, losses, adapters.DataAdapter, epoch_iterator)
    except (AssertionError, AttributeError, ImportError) as error:
        raise UnsupportedKerasError(
            f"Keras {keras.__version__} lacks what strategies need to train its models "
            f"({error!r}). Install a version that distribax is tested with: "
            "pip install 'distribax[keras]'."
        ) from error


def _check_behaviour(trainer: type) -> None:
    variable = keras.Variable([1.0])
    assert "_value" in variable.__dict__, "keras.Variable has no attribute _value"
    assert variable.__dict__["_value"] is variable.value, "keras.Variable._value is not its value"
    variable.assign([2.0])
    assert variable.__dict__["_value"] is variable.value, "assign does not write _value"
    assert issubclass(keras.Model, trainer), "keras.Model has another trainer"
    optimizer = keras.optimizers.SGD()
    assert optimizer._trainable_variables == [], "optimizers keep their variables elsewhere"

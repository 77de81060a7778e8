"""Keras's models, optimizers and variables in `dx.Checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.integrations.foreign_variable import refuse_replacement
from distribax.integrations.keras import variables
from distribax.training.checkpoints.tracked import ForeignSlot, Put


class KerasSlot(ForeignSlot):
    """A Keras variable in a checkpoint."""

    def __init__(self, variable: keras.Variable) -> None:
        self._variable = variable

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self._variable.shape)

    @property
    @override
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(jnp.dtype(self._variable.dtype))

    @property
    @override
    def described(self) -> str:
        return f"keras.Variable {self._variable.path!r} of shape {self.shape}"

    @property
    @override
    def strategy(self) -> contracts.Strategy | None:
        return variables.get_strategy(self._variable)

    @override
    def stop_waiting(self) -> None:
        variables.stop_waiting(self._variable)

    @override
    def read(self) -> np.ndarray:
        return np.array(jax_private.pick_copy(jnp.asarray(self._variable.value)))

    @override
    def write(self, value: np.ndarray, is_first: bool) -> None:
        variables.restore_value(self._variable, np.asarray(value, self.dtype))


def track_variable(variable: keras.Variable) -> Iterator[tuple[str, Any, Put]]:
    """Yields the place of a variable's value, for a checkpoint."""
    yield "", KerasSlot(variable), refuse_replacement


def track_variables(
    thing: keras.Layer | keras.Optimizer | keras.Metric,
) -> Iterator[tuple[str, Any, Put]]:
    """Yields the variables of a layer, a model (not of its optimizer), an optimizer or a metric."""
    # By position: names depend on how many layers were made before in the process.
    for index, variable in enumerate(thing.variables):
        yield str(index), variable, refuse_replacement

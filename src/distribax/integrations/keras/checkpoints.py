"""Keras's models, optimizers and variables in `dx.Checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from distribax.integrations.foreign_variable import refuse_replacement
from distribax.training.checkpoints.tracked import Put


def track_variable(variable: keras.Variable) -> Iterator[tuple[str, Any, Put]]:
    """Yields the value of a variable, for a checkpoint."""
    yield "", variable.value, variable.assign


def track_variables(
    thing: keras.Layer | keras.Optimizer | keras.Metric,
) -> Iterator[tuple[str, Any, Put]]:
    """Yields the variables of a layer, a model (not of its optimizer), an optimizer or a metric."""
    # By position: names depend on how many layers were made before in the process.
    for index, variable in enumerate(thing.variables):
        yield str(index), variable, refuse_replacement

"""Keras's models, optimizers and variables in `dx.Checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from distribax.training.checkpoints.tracked import Put


def track_variable(variable: keras.Variable) -> Iterator[tuple[str, Any, Put]]:
    """Yields the value of a variable, for a checkpoint."""
    yield "", variable.value, variable.assign


def track_layer(layer: keras.Layer) -> Iterator[tuple[str, Any, Put]]:
    """Yields the variables of a layer or a model; not those of its optimizer."""
    yield from _list(layer.variables)


def track_stateful(thing: keras.Optimizer | keras.Metric) -> Iterator[tuple[str, Any, Put]]:
    """Yields the variables of an optimizer or a metric."""
    yield from _list(thing.variables)


def _list(variables: Iterable[keras.Variable]) -> Iterator[tuple[str, Any, Put]]:
    # By position: names depend on how many layers were made before in the process.
    for index, variable in enumerate(variables):
        yield str(index), variable, _refuse_replacement


def _refuse_replacement(new: object) -> None:
    raise AssertionError("variables are changed, not replaced")

"""The kinds of foreign variables that gradients and optimizers may be given."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from distribax import contracts
from distribax.execution import adapters
from distribax.variables import Variable


class Differentiable(Hashable, Protocol):
    """What a gradient can be taken with respect to."""

    @property
    def source(self) -> contracts.Source | None:
        """Where the value is fetched from if it lives in another process, or None."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""

    def read_value(self) -> jax.Array:
        """Returns the value, by the rules of the current context."""


@dataclass(frozen=True)
class VariableKind:
    """How variables of another library are used here.

    Attributes:
        differentiable: Returns what stands for a variable while a function is differentiated.
        promote: Makes a variable one that keeps its value in a `dx.Variable`, and returns that.
    """

    differentiable: Callable[[Any], Differentiable]
    promote: Callable[[Any], Variable]


_kinds: dict[type, VariableKind] = {}


def register(variable_type: type, kind: VariableKind) -> None:
    """Says how variables of a type of another library are used here."""
    _kinds[variable_type] = kind


def as_differentiable(leaf: Any) -> Any:
    """Returns what stands for a variable in a gradient; other things as they are."""
    kind = _find_kind(leaf)
    return leaf if kind is None else kind.differentiable(leaf)


def as_target(variable: Any) -> Any:
    """Returns the variable that an optimizer updates for one; other things as they are."""
    kind = _find_kind(variable)
    return variable if kind is None else kind.promote(variable)


def _find_kind(leaf: object) -> VariableKind | None:
    # There may have been no step and no scope yet.
    adapters.load_adapters()
    return next((_kinds[base] for base in type(leaf).__mro__ if base in _kinds), None)

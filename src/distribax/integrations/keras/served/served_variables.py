"""Keras variables, in the coordinator's process, whose values are on parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from distribax import jax_private
from distribax.integrations.foreign_variable import Arrays, Rule
from distribax.integrations.keras import variables
from distribax.training.gradient_pairs import Target
from distribax.types import VariableAggregation


class ServedVariable(variables.KerasVariable):
    """The value of a Keras variable on a server.

    Whoever reads or writes it first waits for the steps that are under way: Keras's loops, and
    callbacks, expect that a step has run when its function has returned.

    Args:
        name: What messages call the variable.
        target: The variable on the servers.
        join: Waits for the steps.
    """

    def __init__(self, name: str, target: Target, join: Callable[[], None]) -> None:
        super().__init__(name, Rule(VariableAggregation.NONE), jnp.zeros(()))
        self.target = target
        self._join = join

    @override
    def read(self) -> Any:
        self._join()
        # Keras builds a model by tracing it, weights that are there already included.
        return jax_private.run_outside_trace(lambda: jnp.asarray(self.target.numpy()))

    @override
    def write(self, value: Arrays) -> None:
        self._join()
        self.target.assign(np.asarray(value))


class SeedVariable(variables.KerasVariable):
    """The state of a random generator, which stays here: each step is given its own numbers.

    Args:
        name: What messages call the variable.
        state: A seed, and a number that grows.
    """

    def __init__(self, name: str, state: Arrays) -> None:
        super().__init__(name, Rule(VariableAggregation.NONE), jnp.zeros(()))
        self._state = np.array(state, np.uint32)

    @override
    def read(self) -> Any:
        return jax_private.run_outside_trace(lambda: jnp.asarray(self._state))

    @override
    def write(self, value: Arrays) -> None:
        self._state = np.array(value, np.uint32)

    def draw(self) -> np.ndarray:
        """Returns the state for one step, and goes on to the next."""
        drawn = self._state.copy()
        self._state[1] += np.uint32(1)
        return drawn


def keep_seed(variable: keras.Variable) -> SeedVariable:
    """Lets the state of a random generator be counted here from now on."""
    foreign = variables.adopt(variable)
    if not isinstance(foreign, SeedVariable):
        foreign = SeedVariable(f"keras.Variable {variable.path!r}", variable.value)
        variables.replace_foreign(variable, foreign)
    return foreign


def serve(variable: keras.Variable, target: Target, join: Callable[[], None]) -> None:
    """Lets a variable have its value on the servers from now on."""
    name = f"keras.Variable {variable.path!r}"
    variables.replace_foreign(variable, ServedVariable(name, target, join))


def find_target(variable: keras.Variable) -> Target | None:
    """Returns the variable on the servers, or None if it is not there."""
    foreign = variables.adopt(variable)
    return foreign.target if isinstance(foreign, ServedVariable) else None

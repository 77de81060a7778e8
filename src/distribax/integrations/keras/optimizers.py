"""Keras optimizers in replicas: gradients are added up first, then all replicas do the same."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import keras

from distribax.execution import frames
from distribax.integrations import replica_state
from distribax.integrations.keras import shares
from distribax.integrations.keras.variables import as_keras
from distribax.integrations.replacement import Function, replacement

Values: TypeAlias = list[Any]

# Optimizers call each other: only the gradients that the outermost one is given are added up.
_is_inner: ContextVar[bool] = ContextVar("distribax_keras_inner_optimizer", default=False)


@replacement
def apply_together(
    stateless_apply: Function,
    optimizer: keras.Optimizer,
    optimizer_variables: Values,
    grads: Values,
    variables: Values,
) -> tuple[Values, Values]:
    """Runs `Optimizer.stateless_apply` in a replica."""
    share = shares.current()
    grads = _add_up_gradients(optimizer, grads)
    with _Inner():
        new, state = stateless_apply(optimizer, optimizer_variables, grads, variables)
    if share is not None:
        share.note_same([*new, *state])
    return new, state


@replacement
def weigh_loss(scale_loss: Function, optimizer: keras.Optimizer, loss: jax.Array) -> jax.Array:
    """Runs `Optimizer.scale_loss`, and weighs the loss of a replica of `fit` by its share.

    Steps that do not call it have their gradients weighed instead, which is the same unless the
    replicas' losses depend on each other.
    """
    share = shares.current()
    scaled: jax.Array = scale_loss(optimizer, loss)
    return scaled if share is None else share.weigh(optimizer, scaled)


@replacement
def update_together(
    apply: Function,
    optimizer: keras.Optimizer,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> Any:
    """Runs `Optimizer.apply`, which writes variables, in a replica."""
    state = replica_state.current()
    if trainable_variables is not None:
        trainable_variables = list(map(as_keras, trainable_variables))
    if _is_inner.get() or (state is None and frames.current() is None):
        return apply(optimizer, grads, trainable_variables)
    if trainable_variables is not None and not optimizer.built:
        # Its variables are made once, and not by each replica or trace.
        with jax.ensure_compile_time_eval():
            optimizer.build(trainable_variables)
    grads = _add_up_gradients(optimizer, list(grads))
    with contextlib.nullcontext() if state is None else state.together():
        return _update(apply, optimizer, grads, trainable_variables)


@replacement
def build_for_ours(build: Function, optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Builds an optimizer, also for `dx.Variable`s."""
    build(optimizer, list(map(as_keras, variables)))


def _update(
    apply: Function,
    optimizer: keras.Optimizer,
    grads: Values,
    variables: Sequence[keras.Variable] | None,
) -> Any:
    with _Inner():
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return apply(optimizer, grads, variables)
        # It writes in the branches of a condition, which values cannot leave.
        targets = optimizer._trainable_variables
        by_id = dict(zip(map(id, targets if variables is None else variables), grads, strict=True))
        new, state = optimizer.stateless_apply(
            [variable.value for variable in optimizer.variables],
            [by_id.get(id(variable)) for variable in targets],
            [variable.value for variable in targets],
        )
        for variable, value in zip((*targets, *optimizer.variables), (*new, *state), strict=True):
            variable.assign(value)


def _add_up_gradients(optimizer: keras.Optimizer, grads: Values) -> Values:
    """Returns the gradients of all replicas, added up as the share of each says."""
    state = replica_state.current()
    if _is_inner.get() or state is None or state.replica.num_replicas_in_sync == 1:
        return grads
    share = shares.current()
    if share is not None and not share.has_weighed(optimizer):
        grads = [None if grad is None else _scale(grad, share.weight) for grad in grads]
    added: Values = state.add_up(grads)
    return added


def _scale(grad: jax.Array, weight: float | jax.Array) -> jax.Array:
    return grad * (weight if isinstance(weight, float) else weight.astype(grad.dtype))


class _Inner:
    """Marks the optimizers that run inside as not the outermost."""

    def __enter__(self) -> None:
        self._token = _is_inner.set(True)

    def __exit__(self, *error: object) -> None:
        _is_inner.reset(self._token)

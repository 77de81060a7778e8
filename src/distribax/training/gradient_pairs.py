"""The pairs of gradient and variable that an optimizer is given: checks, and sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from distribax import context
from distribax.values import IndexedSlices, Mirrored
from distribax.variables import ShardedVariable, Variable


def of_variables(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Returns the gradients and the variables; pairs whose gradient is None are left out.

    Of what lives in this process, gradients are whole arrays, and a sharded variable is its shards.
    """
    grads: list[Any] = []
    variables: list[Any] = []
    pairs: dict[Any, int] = {}
    for index, (grad, variable) in enumerate(grads_and_vars):
        if grad is None:
            continue
        _check(index, grad, variable)
        for _, each in variable.row_shards:
            if pairs.setdefault(each, index) != index:
                raise ValueError(
                    f"apply_gradients: {variable.described} is in the pairs {pairs[each]} and "
                    f"{index}. Add up its gradients, and pass it once."
                )
        if isinstance(grad, IndexedSlices):
            grad = IndexedSlices(grad.values, grad.indices, variable.shape)
        if variable.source is None and isinstance(grad, IndexedSlices):
            grad = grad.__jax_array__()
        if variable.source is None and isinstance(variable, ShardedVariable):
            grads.extend(variable.divided(grad))
        else:
            grads.append(grad)
        variables.extend(targets_of(variable))
    return grads, variables


def targets_of(variable: Any) -> list[Any]:
    """Returns what an optimizer updates for a variable: of one in this process, its shards."""
    is_divided = variable.source is None and isinstance(variable, ShardedVariable)
    return variable.variables if is_divided else [variable]


def _check(index: int, grad: Any, variable: Any) -> None:
    if not isinstance(variable, (Variable, ShardedVariable)):
        raise TypeError(
            f"apply_gradients: the variable of pair {index} is {variable!r}, not a dx.Variable. "
            "Pass (gradient, variable) pairs, in this order."
        )
    strategy = context.get_strategy()
    if context.has_strategy() and variable.distribute_strategy is not strategy:
        raise ValueError(
            f"apply_gradients: {variable.described} was not created under the strategy "
            f"{type(strategy).__name__} that runs now. Create it inside `with strategy.scope():`."
        )
    if isinstance(grad, IndexedSlices):
        _check_slices(index, grad, variable)
    shape = jnp.shape(grad.get()) if isinstance(grad, Mirrored) else getattr(grad, "shape", None)
    if isinstance(grad, (int, float)):
        shape = ()
    if shape is not None and tuple(shape) != variable.shape:
        raise ValueError(
            f"apply_gradients: the gradient of pair {index} has shape {tuple(shape)}, but "
            f"{variable.described} has shape {variable.shape}. Are the pairs in the same order?"
        )


def _check_slices(index: int, grad: IndexedSlices, variable: Any) -> None:
    indices, values = jnp.shape(grad.indices), jnp.shape(grad.values)
    if not jnp.issubdtype(jnp.result_type(grad.indices), jnp.integer):
        raise ValueError(
            f"apply_gradients: the indices of the sparse gradient of pair {index} "
            f"({variable.described}) are not integers. Something was computed with the gradient's "
            "arrays one by one, as jax.tree.map and optax do; compute with the gradient itself "
            "(2 * g), or with its rows only: "
            "dx.IndexedSlices(fn(g.values), g.indices, g.dense_shape)."
        )
    if len(indices) != 1 or values != (*indices, *variable.shape[1:]):
        raise ValueError(
            f"apply_gradients: the sparse gradient of pair {index} has values of shape {values} "
            f"and indices of shape {indices}, but {variable.described} has rows of shape "
            f"{variable.shape[1:]}. Expected one index for each row."
        )

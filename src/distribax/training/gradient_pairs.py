"""The pairs of gradient and variable that an optimizer is given: checks, and sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from distribax import context, contracts, jax_private
from distribax.execution import frames
from distribax.training.variable_kinds import as_target
from distribax.types import ReduceOp
from distribax.values import ArrayLike, DistributedValues, IndexedSlices, Mirrored, is_wrapped
from distribax.variables import ShardedVariable, Variable
from distribax.variables.sharded.division import check_ids

Target: TypeAlias = Variable | ShardedVariable
"""What an optimizer updates."""

Grad: TypeAlias = jax.Array | IndexedSlices | DistributedValues | float
"""What an optimizer takes as the gradient of a target."""


def split_pairs(
    grads_and_vars: Iterable[tuple[Grad | None, Target]],
) -> tuple[list[Grad | None], list[Target]]:
    """Returns the gradients, some of which may be None, and the variables.

    Of what lives in this process, gradients are whole arrays, and a sharded variable is its shards.
    """
    grads: dict[Target, Grad | None] = {}
    pairs: dict[Variable, int] = {}
    _refuse_one_value(grads_and_vars)
    for index, pair in enumerate(grads_and_vars):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"apply_gradients: grads_and_vars[{index}]={pair!r} is no pair. Pass pairs of a "
                "gradient and its variable: optimizer.apply_gradients(zip(grads, variables))."
            )
        grad, variable = pair[0], as_target(pair[1])
        _check(index, grad, variable)
        targets = list_targets(variable)
        if grad is None:
            grads.update((target, None) for target in targets if target not in grads)
            continue
        for each in variable.states:
            if pairs.setdefault(each, index) != index:
                raise ValueError(
                    f"apply_gradients: {variable.described} is in the pairs {pairs[each]} and "
                    f"{index}. Add up its gradients, and pass it once."
                )
        if isinstance(grad, IndexedSlices):
            grad = IndexedSlices(grad.values, grad.indices, variable.shape)
        if variable.source is None and isinstance(grad, IndexedSlices):
            grad = grad.__jax_array__()
        parts = [grad]
        if isinstance(variable, ShardedVariable) and targets[0] is not variable:
            parts = list(variable.divide(cast("jax.Array", grad)))
        grads.update(zip(targets, parts, strict=True))
    return list(grads.values()), list(grads)


def _refuse_one_value(grads_and_vars: object) -> None:
    if isinstance(grads_and_vars, (jax.Array, np.ndarray, ArrayLike)):
        raise TypeError(
            f"apply_gradients: grads_and_vars={grads_and_vars!r} is one value. Pass pairs of a "
            "gradient and its variable: optimizer.apply_gradients([(grad, variable)])."
        )


def order_gradients(
    grads: Sequence[Grad | None], variables: Sequence[Target], targets: Sequence[Target]
) -> list[Grad | None]:
    """Returns the gradients in the order of the targets; None for those that are not given."""
    given = dict(zip(variables, grads, strict=True))
    unknown = [variable for variable in variables if variable not in set(targets)]
    if unknown:
        raise ValueError(
            f"apply_gradients: {unknown[0].described} is not among the variables that the "
            f"optimizer was built for, {[target.name for target in targets]}. Make one optimizer "
            "for each list of variables, or call optimizer.build(all variables) first."
        )
    return [given.get(target) for target in targets]


def list_targets(variable: Target) -> list[Target]:
    """Returns what an optimizer updates for a variable: of one in this process, its shards."""
    variable = as_target(variable)
    if variable.source is None and isinstance(variable, ShardedVariable):
        return list(variable.variables)
    return [variable]


def are_served(targets: Sequence[Target]) -> bool:
    """Tells whether the targets of an optimizer live on parameter servers.

    Raises:
        ValueError: Some do, and others do not.
    """
    source = targets[0].source
    for target in targets:
        if target.source is not source:
            served, other = (targets[0], target) if source is not None else (target, targets[0])
            raise ValueError(
                f"dx.Optimizer: {served.described} lives on parameter servers, and "
                f"{other.described} does not live there. Create both inside one "
                "`with strategy.scope():`, or make one optimizer for each."
            )
    return source is not None


def _check(index: int, grad: Grad | None, variable: Target) -> None:
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
    if frames.current() is None and any(map(jax_private.is_tracer, jax.tree.leaves(grad))):
        raise RuntimeError(
            f"apply_gradients: the gradient of {variable.described} is a value of a JAX "
            "transformation that is still tracing (jax.jit, jax.lax.scan, ...), and the update "
            "cannot leave it. Use @dx.function instead of @jax.jit; for other transformations "
            "return the gradient and apply it outside."
        )
    shape = jnp.shape(grad.get()) if isinstance(grad, Mirrored) else getattr(grad, "shape", None)
    if isinstance(grad, (int, float)):
        shape = ()
    if shape is not None and tuple(shape) != variable.shape:
        raise ValueError(
            f"apply_gradients: the gradient of pair {index} has shape {tuple(shape)}, but "
            f"{variable.described} has shape {variable.shape}. Are the pairs in the same order?"
        )


def _check_slices(index: int, grad: IndexedSlices, variable: Target) -> None:
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
    # While a step is traced they are not known yet; servers look at them when it has run.
    if not jax_private.is_tracer(grad.indices):
        check_ids("apply_gradients", variable.shape, variable.described, np.asarray(grad.indices))


def unite(
    strategy: contracts.Strategy,
    op: ReduceOp | None,
    grads: Sequence[Grad | None],
    targets: Sequence[Target] | None,
    places: Sequence[int],
) -> list[Grad | None]:
    """Returns the gradients with one for all replicas at some places.

    Without an `op` they have been combined already, and the first replica's are taken.
    """
    assert targets is not None
    pairs = [(grads[place], targets[place]) for place in places]
    extended = strategy.extended
    united: list[Any] = []
    if op is None:
        united = [extended.first_value(g) if is_wrapped(g) else g for g, _ in pairs]
    elif pairs:
        united = extended.batch_reduce_to(op, pairs)
    found = dict(zip(places, united, strict=True))
    return [found.get(place, grad) for place, grad in enumerate(grads)]


def refuse_constraints(targets: Sequence[Target]) -> None:
    """Raises if a variable on a parameter server has a constraint."""
    for target in targets:
        if target.constraint is not None:
            raise ValueError(
                f"dx.Optimizer: {target.described} has a constraint, which a parameter "
                "server, where the update runs, cannot call. Apply it in the worker's "
                "function: v.assign(constraint(v.value()))."
            )

"""Gradients with respect to variables."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from distribax import contracts
from distribax.execution import overlay
from distribax.execution.traces.lookup_gradients import Inflow, LookupGradients, note_gradients
from distribax.training import eager_gradients
from distribax.training.variable_kinds import as_differentiable
from distribax.values import IndexedSlices
from distribax.variables import ShardedVariable, Variable

AnyVariable: TypeAlias = Variable | ShardedVariable


def value_and_grad(
    fn: Callable[..., Any], variables: object = None, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that computes `fn` and its gradient with respect to `variables`.

    The gradients have the form of `variables`. In a replica they are the replica's own:
    combining them is the optimizer's work, or `all_reduce`'s. That of a table on parameter servers
    of which `fn` only looks up rows (`dx.embedding_lookup`) is a `dx.IndexedSlices`.

    Args:
        fn: A function that reads the variables and returns a scalar loss (or, with `has_aux`, a
            pair of the loss and anything else).
        variables: A nest of variables; a single variable is a nest too.
        has_aux: Whether `fn` returns something beside the loss.

    Returns:
        A function with the arguments of `fn` that returns the loss (with `has_aux`, the pair) and
        the gradients.

    Raises:
        TypeError: `fn` is not callable, or a variable does not hold floating-point numbers.
        ValueError: `variables` is empty or holds something else than variables.

    Example:
        >>> import distribax as dx
        >>> w = dx.Variable(3.0)
        >>> loss, grad = dx.value_and_grad(lambda x: w * w * x, w)(2.0)
        >>> float(loss), float(grad)
        (18.0, 12.0)
    """
    if not callable(fn):
        raise TypeError(
            f"value_and_grad: fn={fn!r} is not callable. Pass the loss function itself: "
            "dx.value_and_grad(loss_fn, variables)(x, y)."
        )
    leaves, tree = jax.tree.flatten(variables)
    # What has a gradient, in place of variables of other libraries.
    states = [as_differentiable(leaf) for leaf in leaves]
    kinds = (Variable, ShardedVariable)
    strange = [
        leaf
        for leaf, state in zip(leaves, states, strict=True)
        if leaf is state and not isinstance(leaf, kinds)
    ]
    if variables is None or strange:
        raise ValueError(
            f"value_and_grad: variables={strange[:1] or None!r} is not a nest of dx.Variable. "
            "Name the variables to differentiate with respect to; for arrays use "
            "jax.value_and_grad(fn)(params, x)."
        )
    if not leaves:
        raise ValueError(
            f"value_and_grad: variables={variables!r} holds no variable. A model has none "
            "before it is built: by its first call or, in `with strategy.scope():`, by "
            "model.build(input_shape)."
        )
    leaves = states
    # A variable may be named twice, as tied weights are: what stands in for it is one value.
    once = list(dict.fromkeys(leaves))
    here = [leaf for leaf in once if leaf.source is None]
    away = [leaf for leaf in once if leaf.source is not None]
    for leaf in away:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"value_and_grad: {leaf.described} has the data type {jnp.dtype(leaf.dtype).name}. "
                "There are gradients with respect to floating-point numbers only."
            )

    def call(*args: object, **kwargs: object) -> tuple[Any, Any]:
        def of_values(values: list[jax.Array]) -> Any:
            pieces = map(_split, here, values)
            with overlay.lay_over(dict(chain.from_iterable(pieces))):
                return fn(*args, **kwargs)

        values = [leaf.read_value() for leaf in here]
        if not away:
            result, own = eager_gradients.differentiate(fn, of_values, values, has_aux)
            flows: list[Inflow] = []
        else:
            result, own, flows = _differentiate_remote(of_values, values, away, has_aux)
        by_leaf: dict[AnyVariable, Any] = dict(zip(here, own, strict=True))
        by_leaf.update((leaf, _collect(leaf, flows)) for leaf in away)
        return result, jax.tree.unflatten(tree, [by_leaf[leaf] for leaf in leaves])

    return call


def _differentiate_remote(
    of_values: Callable[[list[jax.Array]], Any],
    values: list[jax.Array],
    away: list[AnyVariable],
    has_aux: bool,
) -> tuple[Any, list[Any], list[Inflow]]:
    """Differentiates a function that reads variables of other processes while it runs."""
    outside = contextvars.copy_context()
    flows: list[Inflow] = []
    shards = [variable for leaf in away for variable in leaf.states]

    def of_all(values: list[jax.Array], token: jax.Array) -> Any:
        gradients = LookupGradients(token, away, shards, flows)
        unread: dict[contracts.Variable, jax.Array | overlay.Unread] = {
            v: overlay.Unread(_make_reader(gradients, v, outside)) for v in shards
        }
        with overlay.lay_over(unread), note_gradients(gradients):
            return of_values(values)

    differentiated = jax.value_and_grad(of_all, argnums=(0, 1), has_aux=has_aux)
    result, (own, _) = differentiated(values, jnp.zeros(()))
    return result, own, flows


def _split(leaf: AnyVariable, value: jax.Array) -> list[tuple[Variable, jax.Array]]:
    """Returns the variables that a leaf consists of, with their part of its value."""
    if not isinstance(leaf, ShardedVariable):
        return [(leaf, value)]
    parts = zip(leaf.variables, leaf.division.slices, strict=True)
    return [(variable, value[rows]) for variable, rows in parts]


def _make_reader(
    gradients: LookupGradients, variable: Variable, outside: contextvars.Context
) -> Callable[[], Any]:
    """Returns how the differentiated function reads a variable for the first time."""

    def read() -> Any:
        # As it is outside: another function that is being differentiated may be there.
        return gradients.mark(variable, outside.copy().run(variable.read_value))

    return lambda: gradients.run_inside(read)


def _collect(leaf: AnyVariable, flows: list[Inflow]) -> jax.Array | IndexedSlices:
    """Returns the gradient with respect to one variable: sparse if only rows of it were read."""
    rows = [flow for flow in flows if flow.what is leaf and flow.ids is not None]
    whole = [_find_whole(variable, flows) for variable in leaf.states]
    if not rows or any(part is not None for part in whole):
        shards = [
            jnp.zeros(variable.shape, variable.dtype) if part is None else part
            for variable, part in zip(leaf.states, whole, strict=True)
        ]
        dense = shards[0] if len(shards) == 1 else jnp.concatenate(shards)
        for flow in rows:
            if flow.gradient is not None:
                dense = _make_slices(leaf, [flow]).add_to(dense)
        return dense
    return _make_slices(leaf, [flow for flow in rows if flow.gradient is not None])


def _find_whole(variable: Variable, flows: list[Inflow]) -> Any | None:
    """Returns the gradient with respect to a variable that was read as a whole, or None."""
    for flow in flows:
        if flow.what is variable and flow.ids is None:
            zeros = flow.gradient is None
            return jnp.zeros(variable.shape, variable.dtype) if zeros else flow.gradient
    return None


def _make_slices(leaf: AnyVariable, flows: list[Inflow]) -> IndexedSlices:
    row = leaf.shape[1:]
    values = [jnp.reshape(flow.gradient, (-1, *row)) for flow in flows]  # type: ignore[arg-type]
    indices = [jnp.reshape(flow.ids, -1) for flow in flows]  # type: ignore[arg-type]
    if not flows:
        values, indices = [jnp.zeros((0, *row), leaf.dtype)], [jnp.zeros(0, jnp.int32)]
    if len(values) == 1:
        return IndexedSlices(values[0], indices[0], leaf.shape)
    return IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), leaf.shape)

"""Gradients with respect to variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from distribax.execution import overlay
from distribax.types import Nest, StepFn
from distribax.variables import Variable


def value_and_grad(
    fn: StepFn, variables: Nest = None, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Nest]]:
    """Returns a function that computes `fn` and its gradient with respect to `variables`.

    The gradients have the form of `variables`. In a replica they are the replica's own:
    combining them is the optimizer's work, or `all_reduce`'s.

    Args:
        fn: A function that reads the variables and returns a scalar loss (or, with `has_aux`, a
            pair of the loss and anything else).
        variables: A nest of variables; a single variable is a nest too.
        has_aux: Whether `fn` returns something beside the loss.

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
    if not leaves or not all(isinstance(leaf, Variable) for leaf in leaves):
        strange = [leaf for leaf in leaves if not isinstance(leaf, Variable)]
        raise ValueError(
            f"value_and_grad: variables={strange[:1] or variables!r} is not a nest of dx.Variable. "
            "Name the variables to differentiate with respect to; for arrays use "
            "jax.value_and_grad(fn)(params, x)."
        )

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Nest]:
        def of_values(values: list[Any]) -> Any:
            with overlay.overlaid(dict(zip(leaves, values, strict=True))):
                return fn(*args, **kwargs)

        values = [variable.read_value() for variable in leaves]
        result, gradients = jax.value_and_grad(of_values, has_aux=has_aux)(values)
        return result, jax.tree.unflatten(tree, gradients)

    return call

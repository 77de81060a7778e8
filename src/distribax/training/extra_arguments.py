"""Further arguments of an update, which some optax transformations take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from distribax import contracts
from distribax.errors import VariableInJitError
from distribax.jax_private import jaxprs

if TYPE_CHECKING:
    import optax

ExtraArg: TypeAlias = jax.Array | float | Sequence[jax.Array] | Callable[..., object]
"""What a transformation may take beside gradients and parameters: `value`, `grad`, `value_fn`."""

_COMMON = {"value", "grad", "value_fn"}
"""What optax says that every transformation may be given, whether it uses it or not."""


def are_plain(extra_args: Mapping[str, ExtraArg]) -> bool:
    """Tells whether all arguments can be inputs of a program."""
    return all(isinstance(leaf, (jax.Array, float)) for leaf in jax.tree.leaves(extra_args))


def check_no_functions(extra_args: Mapping[str, ExtraArg], reason: str) -> None:
    """Raises if a function is among the arguments."""
    for name, value in extra_args.items():
        if callable(value):
            raise ValueError(f"apply_gradients: {name}={value!r} is a function, and {reason}")


def refuse_global_step(extra_args: Mapping[str, ExtraArg]) -> None:
    """Raises if there is the counter that optimizers of TensorFlow 1 take."""
    if "global_step" in extra_args:
        raise TypeError(
            "apply_gradients: global_step is an argument of TensorFlow 1. optimizer.iterations "
            "counts the updates; a counter of your own is a variable: step.assign_add(1). An "
            "Estimator counts its steps itself."
        )


def refuse_unused(
    transformation: optax.GradientTransformationExtraArgs,
    targets: Sequence[contracts.Table],
    extra_args: Mapping[str, ExtraArg],
    used: set[str],
) -> None:
    """Raises if numbers are among the arguments that a transformation does not look at.

    An update takes arguments of any name, so that a misspelt one would go unnoticed.

    Args:
        transformation: The optax transformation.
        targets: The variables that it updates.
        extra_args: What it is to be given.
        used: The names of those that it is known to look at; more are added.
    """
    numbers = {
        name: value
        for name, value in extra_args.items()
        if name not in _COMMON | used and _is_number(value)
    }
    if not numbers:
        return
    params = [jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets]
    rest = {name: value for name, value in extra_args.items() if name not in numbers}

    def update(numbers: dict[str, Any], params: list[Any]) -> Any:
        state = transformation.init(params)
        return transformation.update(params, state, params, **rest, **numbers)

    try:
        used |= jaxprs.find_used_inputs(update, numbers, params)
    except VariableInJitError:  # A rate that is a variable, for example.
        return
    unused = sorted(numbers.keys() - used)
    if unused:
        raise TypeError(
            f"apply_gradients: {', '.join(unused)}: neither an argument of apply_gradients "
            "(name, experimental_aggregate_gradients, skip_gradients_aggregation) nor used by the "
            "transformation. Is it spelt right?"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, complex)) or hasattr(value, "dtype")

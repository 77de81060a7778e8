"""Further arguments of an update, which some optax transformations take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax

ExtraArg: TypeAlias = jax.Array | float | Sequence[jax.Array] | Callable[..., object]
"""What a transformation may take beside gradients and parameters: `value`, `grad`, `value_fn`."""


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

"""Functions that make initial values: the whole of a variable, or one shard at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from distribax import jax_private

Initializer = Callable[..., Any]
"""Returns an initial value; it may take `shape`, `dtype`, `partition_shape`, `partition_offset`."""


@dataclass(frozen=True)
class ShardRange:
    """Which part of a variable is to be made.

    Attributes:
        shape: The shape of the whole variable.
        rows: The rows that the part has.
    """

    shape: tuple[int, ...]
    rows: slice

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (self.rows.stop - self.rows.start, *self.shape[1:])

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part begins in each dimension."""
        return (self.rows.start, *(0 for _ in self.shape[1:]))


def takes_part(initializer: object) -> bool:
    """Tells whether an initial value is a function that can make one shard of it."""
    parameters = _get_parameters(initializer)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return takes_any or {"partition_shape", "partition_offset"} <= parameters.keys()


def make_whole(
    initializer: Initializer,
    shape: Sequence[int] | None,
    dtype: jax.typing.DTypeLike | None,
) -> Any:
    """Calls an initializer for a variable that is not divided."""
    if shape is None:
        return initializer()
    whole = tuple(shape)
    given = {"partition_shape": whole, "partition_offset": (0,) * len(whole)}
    return initializer(**_choose(initializer, {"shape": whole, "dtype": dtype, **given}))


def make_part(
    initializer: Initializer, part: ShardRange, dtype: jax.typing.DTypeLike | None, name: str
) -> Any:
    """Calls an initializer for one shard of a variable.

    Raises:
        ValueError: What it returns has neither the shape of the shard nor that of the whole.
    """
    chosen = _choose(initializer, {"shape": part.shape, "dtype": dtype})
    made = initializer(partition_shape=part.part_shape, partition_offset=part.offset, **chosen)
    shape = tuple(np.shape(made))
    if shape == part.part_shape:
        return made
    if shape == part.shape:
        # It takes the arguments, as any others, and does not look at them.
        return made[part.rows]
    raise ValueError(
        f"dx.Variable: the initial value of {name!r} was asked for "
        f"partition_shape={part.part_shape} at partition_offset={part.offset}, and has shape "
        f"{shape}. Return an array of partition_shape."
    )


def _choose(initializer: Initializer, offered: Mapping[str, object]) -> dict[str, object]:
    """Returns those of the arguments that the initializer waits for."""
    parameters = _get_parameters(initializer)
    empty = (inspect.Parameter.empty, None)
    return {
        name: value
        for name, value in offered.items()
        if name in parameters and parameters[name].default in empty
    }


def _get_parameters(initializer: object) -> Mapping[str, inspect.Parameter]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    parameters = jax_private.list_parameters(initializer)
    return {each.name: each for each in parameters if each.kind not in positional}

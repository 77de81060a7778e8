"""Values that are known without compiling a program, such as the zeros that a state begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core
from jax.typing import ArrayLike


def compute_on_host(program: core.ClosedJaxpr, inputs: Sequence[np.ndarray]) -> list[Any] | None:
    """Returns what a program computes, if it only fills arrays and passes its inputs on.

    Args:
        program: The program.
        inputs: The values of its inputs.

    Returns:
        The results, as arrays of NumPy's, or None if the program does anything else.
    """
    values: dict[Any, ArrayLike] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    values.update(zip(program.jaxpr.constvars, program.consts, strict=True))
    for equation in program.jaxpr.eqns:
        operand = equation.invars[0] if equation.invars else None
        is_fill = equation.primitive is core.primitives.broadcast_in_dim_p
        if not is_fill or not isinstance(operand, core.Literal):
            return None
        (result,) = equation.outvars
        values[result] = _fill(result.aval, operand.val)
    return [
        _fill(each.aval, each.val) if isinstance(each, core.Literal) else values[each]
        for each in program.jaxpr.outvars
    ]


def _fill(array_type: Any, number: Any) -> np.ndarray:
    return np.full(array_type.shape, number, array_type.dtype)

"""Tests share MLIR contexts; a program that is made while another one is lowered is apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir


def test_a_program_is_made_while_another_one_is_lowered() -> None:
    made: list[float] = []

    def lower(context: Any, x: Any) -> list[Any]:
        made.append(float(jax.jit(lambda y: y * 3 + 0.125)(jnp.float32(2))))
        return [x]

    same = Primitive("same")
    same.def_abstract_eval(lambda x: x)
    mlir.register_lowering(same, lower)

    assert float(jax.jit(lambda x: jnp.sum(same.bind(x * 2)))(jnp.ones(3))) == 6
    assert made == [6.125]

"""Variables that the first call of a function creates, from values that it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close


def _make(o: Any, x: jax.Array, write: bool) -> None:
    """Creates variables from numbers, from each other after a write, and from an argument."""
    o.w = dx.Variable(1.0 if write else 2.0)
    if write:
        o.w.assign_add(1.0)
    o.v = dx.Variable(o.w + 1.0)
    o.r = dx.Variable(jax.random.normal(jax.random.key(0), (2,)) + jnp.zeros(2))
    o.x = dx.Variable(x * 2)


@pytest.mark.parametrize("inside", [False, True])
def test_initial_values_that_the_function_computes(case: Case, inside: bool) -> None:
    o = SimpleNamespace(w=None, traces=0)

    def step(x: jax.Array) -> jax.Array:
        o.traces += 1
        if o.w is None:
            _make(o, x, write=not inside)
        return o.v + o.w + o.x + jnp.sum(o.r.value()) * 0

    def across(x: jax.Array) -> Any:
        return case.strategy.run(step, args=(x,)) if inside else step(x)

    with case.strategy.scope():
        run = dx.function(across) if case.compiled else across
        for _ in range(2):
            result = run(jnp.asarray(5.0))
            assert float(case.parts(result)[0] if inside else result) == 3.0 + 2.0 + 10.0
    if case.compiled:
        assert o.traces == 2
    assert (float(o.w), float(o.v), float(o.x)) == (2.0, 3.0, 10.0)
    close(o.r.numpy(), jax.random.normal(jax.random.key(0), (2,)))


def test_the_first_replica_says_what_a_variable_starts_with(several: Case) -> None:
    o = SimpleNamespace(w=None, total=None)

    def replica(x: jax.Array) -> jax.Array:
        total = dx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        if o.w is None:
            o.w = dx.Variable(jnp.sum(x))
        if o.total is None:
            o.total = dx.Variable(total + o.w)
        return o.w + o.total

    values = several.split(BATCH)
    with several.strategy.scope():
        several.run(replica, values)
    sums = [float(part.sum()) for part in several.parts(values)]
    assert (float(o.w), float(o.total)) == (sums[0], sums[0] + sum(sums))


def test_an_initial_value_of_a_transformation_is_refused() -> None:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx.Variable(carry + x)
        return carry, x

    with pytest.raises(ValueError, match=r"computed inside a JAX transformation"):
        dx.function(lambda x: jax.lax.scan(body, 0.0, x))(jnp.ones(3))

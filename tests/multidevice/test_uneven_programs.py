"""What one program for pieces of different sizes can hold, and when there is none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distribax as dx
from distribax.execution.replicas import uneven
from tests.multidevice.contract.cases import Case, close

ROWS = np.arange(7, dtype=np.float32)


@pytest.fixture
def pair() -> Case:
    return Case("mirrored", 2, compiled=True)


def _step(pair: Case, fn: Any) -> Any:
    return pair.step(lambda x: pair.strategy.run(fn, args=(x,)))


def _is_compiled(step: Any) -> bool:
    return bool(step.trace_count == 1)


def test_values_cross_collectives(pair: Case) -> None:
    """What a size computes before the replicas meet is there when it goes on."""

    def replica_step(x: Any) -> Any:
        context = dx.get_replica_context()
        key = jax.random.fold_in(jax.random.key(1), x.shape[0])
        squares = x * x
        centred = x - context.all_reduce("SUM", jnp.sum(x)) / 7
        # The same again, after a use of what was computed before the replicas met.
        squares = squares / 2 + (x * x) / 2

        @jax.jit
        def normalise(values: Any) -> Any:
            deviation = context.all_reduce("SUM", jnp.sum(values**2))
            return values / jnp.sqrt(deviation)

        @jax.checkpoint
        def weigh(values: Any) -> Any:
            return jnp.sum(values * lax.psum(jnp.sum(values), "replica"))

        grads = jax.grad(weigh)(x)
        return normalise(centred) + 0 * jax.random.uniform(key, x.shape), squares, grads

    step = _step(pair, replica_step)
    normal, squares, grads = step(pair.split(ROWS))
    centred = ROWS - ROWS.mean()
    close(pair.strategy.gather(normal, axis=0), centred / np.linalg.norm(centred), 1e-5)
    close(pair.strategy.gather(squares, axis=0), ROWS**2)
    # The gradient flows back through the sum, from both replicas.
    close(pair.strategy.gather(grads, axis=0), np.full(7, 2 * ROWS.sum()), 1e-5)
    assert _is_compiled(step)


def test_gradients_flow_through_uneven_gathers(pair: Case) -> None:
    def replica_step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            everyone = dx.get_replica_context().all_gather(x * x, axis=0)
            return jnp.sum(everyone * jnp.arange(7.0))

        return jax.grad(loss)(x)

    step = _step(pair, replica_step)
    found = pair.strategy.gather(step(pair.split(ROWS)), axis=0)
    eager = Case("mirrored", 2, compiled=False).run(replica_step, pair.split(ROWS))
    close(found, pair.strategy.gather(eager, axis=0), 1e-5)
    assert _is_compiled(step)


def test_sizes_may_differ_in_any_dimension(pair: Case) -> None:
    ragged = pair.each(lambda index: jnp.full((2 + index, 3 - index), index + 1.0))
    step = _step(pair, lambda x: (x * 2, x.sum()))
    doubled, total = step(ragged)
    shapes = [part.shape for part in pair.strategy.experimental_local_results(doubled)]
    assert shapes == [(2, 3), (3, 2)]
    assert pair.numbers(total) == [6.0, 12.0]
    assert repr(doubled).startswith("PerReplica:{\n  0: Array(")
    assert _is_compiled(step)


def test_a_variable_that_one_size_writes(pair: Case) -> None:
    seen = pair.variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def replica_step(x: Any) -> None:
        if x.shape[0] == 3:
            seen.assign_add(jnp.sum(x))

    step = _step(pair, replica_step)
    step(pair.split(ROWS))
    step(pair.split(ROWS))
    close(seen.read_value(), 2 * ROWS[4:].sum())
    assert _is_compiled(step)


def test_each_size_is_traced_once(pair: Case) -> None:
    """Tracing again would make the first step with a last batch slow."""
    with pair.strategy.scope():
        total = dx.Variable(0.0, aggregation="SUM")
        count = dx.Variable(0, aggregation="SUM")
    sizes: list[int] = []

    def replica_step(x: Any) -> None:
        sizes.append(x.shape[0])
        total.assign_add(jnp.sum(x))
        count.assign_add(jnp.asarray(x.shape[0]))

    _step(pair, replica_step)(pair.split(ROWS))
    assert sizes == [4, 3]
    assert float(total) == ROWS.sum()
    assert int(count) == 7


def test_printing_and_static_results(pair: Case, capfd: pytest.CaptureFixture[str]) -> None:
    def replica_step(x: Any) -> Any:
        jax.debug.print("rows {}", x.shape[0])
        return {"size": x.shape[0], "name": "x", "whole": 3.5, "nothing": None}

    step = _step(pair, replica_step)
    found = step(pair.split(ROWS))
    assert pair.numbers(found["size"]) == [4, 3]
    assert (found["name"], found["whole"], found["nothing"]) == ("x", 3.5, None)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == ["3", "4", "rows", "rows"]
    assert _is_compiled(step)


def _fallbacks() -> dict[str, Any]:
    def more_often(x: Any) -> Any:
        context = dx.get_replica_context()
        total = jnp.zeros(())
        for _ in range(x.shape[0]):
            total = context.all_reduce("SUM", jnp.float32(1))
        return total

    def in_a_loop(x: Any) -> Any:
        def add(carry: Any, _: None) -> Any:
            return carry + dx.get_replica_context().all_reduce("SUM", jnp.sum(x)), None

        return lax.scan(add, jnp.float32(0), None, length=2)[0]

    def shared(x: Any) -> Any:
        merge = lambda _, size: jnp.ones(size if isinstance(size, int) else 1)  # noqa: E731
        return dx.get_replica_context().merge_call(merge, args=(x.shape[0],))

    return {
        "more_often": more_often,
        "in_a_loop": in_a_loop,
        "shared": shared,
        "keys": lambda x: jax.random.split(jax.random.key(0), x.shape[0]).shape[0],
        "key_arrays": lambda x: jax.random.split(jax.random.key(0), x.shape[0]),
        "kinds": lambda x: jnp.sum(x) if x.shape[0] == 4 else 1.0,
        "ranks": lambda x: x if x.shape[0] == 4 else x[:, None],
        "structures": lambda x: (x,) * x.shape[0],
    }


FALLBACKS = _fallbacks()
ERRORS = {
    "more_often": (RuntimeError, "which have ended"),
    "in_a_loop": (RuntimeError, "in a replica that runs eagerly"),
    "structures": (ValueError, "different structure"),
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_where_there_is_no_program_replicas_run_eagerly(pair: Case, kind: str) -> None:
    step = _step(pair, FALLBACKS[kind])
    if kind in ERRORS:
        error, message = ERRORS[kind]
        with pytest.raises(error, match=message):
            step(pair.split(ROWS))
        return
    parts = pair.strategy.experimental_local_results(step(pair.split(ROWS)))
    expected = {"kinds": [6.0, 1.0], "keys": [4, 3], "shared": [1.0]}
    if kind in expected:
        assert [float(np.ravel(part)[0]) for part in parts] == expected[kind]
    else:
        assert [part.shape[0] for part in parts] == [4, 3]
    assert step.trace_count == (kind == "keys")


@pytest.mark.parametrize("limit", ["_MAX_VARIANTS", "_MAX_ROUNDS"])
def test_programs_have_limits(pair: Case, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven, limit, 1)
    step = _step(pair, lambda x: dx.get_replica_context().all_gather(x, axis=0))
    close(step(pair.split(ROWS)), ROWS)
    assert step.trace_count == 0

"""`all_reduce` and `all_gather` in replicas, and gradients through them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, replica_number

OPS = {"SUM": lambda n: 1.0, "MEAN": lambda n: 1.0 / n}


def _context() -> dx.ReplicaContext:
    return dx.get_replica_context()


def test_all_reduce_gives_every_replica_the_result(case: Case) -> None:
    def replica_fn() -> Any:
        reduced = {op: _context().all_reduce(op, replica_number()) for op in OPS}
        return {op: (value, value + replica_number()) for op, value in reduced.items()}

    n = case.num_replicas
    for op, (reduced, added) in case.run(replica_fn).items():
        expected = n * (n + 1) / 2 * OPS[op](n)
        close(case.parts(reduced), [expected] * n)
        close(case.parts(added), [expected + index + 1 for index in range(n)])


def test_all_reduce_takes_nests_and_numbers(case: Case) -> None:
    n = case.num_replicas

    def replica_fn(x: Any) -> Any:
        return _context().all_reduce("SUM", {"a": x, "b": (jnp.ones((2, 2)), [1.0, 2])})

    result = case.run(replica_fn, case.each(lambda index: jnp.asarray(float(index))))
    close(case.parts(result["a"]), [sum(range(n))] * n)
    close(case.parts(result["b"][0]), [np.full((2, 2), n)] * n)
    close(case.parts(result["b"][1][0]), [n] * n)
    close(case.parts(result["b"][1][1]), [2 * n] * n)


def test_all_reduce_of_integers(case: Case) -> None:
    n = case.num_replicas

    def replica_fn() -> Any:
        number = jnp.asarray(_context().replica_id_in_sync_group) + 1
        return _context().all_reduce("SUM", number), _context().all_reduce("MEAN", number)

    total, mean = case.run(replica_fn)
    assert [part.dtype for part in case.parts(total)] == [np.int32] * n
    close(case.parts(mean), [(n + 1) / 2] * n)


def test_all_reduce_of_uneven_pieces_is_refused(several: Case) -> None:
    uneven = several.each(lambda index: jnp.zeros(index + 1))
    with pytest.raises(ValueError, match=r"different shapes"):
        several.run(lambda x: _context().all_reduce("SUM", x), uneven)


def test_the_mean_of_one_replica_keeps_its_type(mirrored: Case) -> None:
    """Eager and compiled alike; that of several is a true division."""
    result = mirrored.run(lambda: _context().all_reduce("MEAN", jnp.arange(2)))
    kind = np.int32 if mirrored.num_replicas == 1 else np.float32
    assert {part.dtype for part in mirrored.parts(result)} == {np.dtype(kind)}


def test_all_gather_joins_along_an_axis(case: Case) -> None:
    n, axes = case.num_replicas, (0, 1, np.int32(-1))

    def replica_fn() -> Any:
        matrix = jnp.full((2, 2), replica_number())
        return [_context().all_gather(matrix, axis=axis) for axis in axes]

    for axis, result in zip(axes, case.run(replica_fn), strict=True):
        expected = np.concatenate([np.full((2, 2), index + 1.0) for index in range(n)], axis=axis)
        close(case.parts(result), [expected] * n)


def test_all_gather_takes_nests(case: Case) -> None:
    n = case.num_replicas

    def replica_fn(x: Any) -> Any:
        return _context().all_gather([x, {"y": x * 2}], axis=0)

    first, second = case.run(replica_fn, case.split(BATCH))
    close(case.parts(first), [BATCH] * n)
    close(case.parts(second["y"]), [BATCH * 2] * n)


def test_all_gather_joins_uneven_pieces(case: Case) -> None:
    n = case.num_replicas
    uneven = np.arange(7, dtype=np.float32)
    result = case.run(lambda x: _context().all_gather(x, axis=0), case.split(uneven))
    close(case.parts(result), [uneven] * n)


@pytest.mark.parametrize("axis", [1, -2, True, None])
def test_all_gather_wants_an_axis_that_fits(small: Case, axis: Any) -> None:
    with pytest.raises(
        ValueError, match=r"all_gather: axis=.* does not fit a value of shape \(2,\)"
    ):
        small.run(lambda: _context().all_gather(jnp.ones(2), axis=axis))


def test_all_gather_wants_no_scalars(small: Case) -> None:
    with pytest.raises(ValueError, match=r"all_gather: axis=0.*x\[None\]"):
        small.run(lambda: _context().all_gather(jnp.ones(()), axis=0))


def test_the_reduction_must_be_known(small: Case) -> None:
    with pytest.raises(ValueError, match=r"reduce_op='MAX' is not a ReduceOp"):
        small.run(lambda: _context().all_reduce("MAX", jnp.ones(2)))


# Gradients: that of an all-reduce is the all-reduce of the gradients.


def test_the_gradient_of_an_all_reduce(case: Case) -> None:
    n = case.num_replicas

    def replica_fn() -> Any:
        number = replica_number()
        w = jnp.asarray(2.0)
        shared = lambda w, op: _context().all_reduce(op, w * number)  # noqa: E731
        own = lambda w, op: _context().all_reduce(op, w * number) * number  # noqa: E731
        return {op: (jax.grad(shared)(w, op), jax.grad(own)(w, op)) for op in OPS}

    numbers = np.arange(1, n + 1)
    for op, (shared, own) in case.run(replica_fn).items():
        close(case.parts(shared), list(numbers * n * OPS[op](n)))
        close(case.parts(own), list(numbers * numbers.sum() * OPS[op](n)))


def test_the_gradient_of_an_all_gather(case: Case) -> None:
    n = case.num_replicas

    def replica_fn(x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(_context().all_gather(w * x, axis=0) ** 2) * replica_number()

        return jax.grad(loss)(jnp.asarray(1.0))

    gradients = case.run(replica_fn, case.split(BATCH))
    weights = n * (n + 1) / 2
    pieces = BATCH.reshape(n, -1)
    close(case.parts(gradients), list((2 * pieces**2).sum(axis=1) * weights))


def test_the_gradient_reaches_variables(case: Case) -> None:
    n = case.num_replicas
    variable = case.variable(3.0)

    def replica_fn() -> Any:
        number = replica_number()
        loss = lambda: _context().all_reduce("SUM", variable * number)  # noqa: E731
        return dx.value_and_grad(loss, variable)()

    loss, gradient = case.run(replica_fn)
    close(case.parts(loss), [3.0 * n * (n + 1) / 2] * n)
    close(case.parts(gradient), [(index + 1.0) * n for index in range(n)])


def _checkpointed_gradient() -> Any:
    number = replica_number()
    loss = jax.checkpoint(lambda w: _context().all_reduce("SUM", w * number))
    return jax.grad(loss)(jnp.asarray(2.0))


def test_the_gradient_through_a_checkpoint(compiled_case: Case) -> None:
    n = compiled_case.num_replicas
    gradient = compiled_case.run(_checkpointed_gradient)
    close(compiled_case.parts(gradient), [(index + 1.0) * n for index in range(n)])


def test_a_checkpoint_in_an_eager_replica_says_to_use_function(pair: Any) -> None:
    with pytest.raises(RuntimeError, match=r"all_reduce: .*@dx.function"):
        pair.run(_checkpointed_gradient)


def test_forward_mode_derivatives(compiled_case: Case) -> None:
    n = compiled_case.num_replicas

    def replica_fn() -> Any:
        number = replica_number()
        function = lambda w: _context().all_reduce("SUM", w * number)  # noqa: E731
        return jax.jvp(function, (jnp.asarray(2.0),), (jnp.asarray(1.0),))[1]

    close(compiled_case.parts(compiled_case.run(replica_fn)), [n * (n + 1) / 2] * n)


def test_a_gradient_with_respect_to_a_constant_is_the_replicas_own(case: Case) -> None:
    gradient = case.run(lambda: jax.grad(lambda w: w * replica_number())(jnp.zeros(())))
    close(case.parts(gradient), [index + 1.0 for index in range(case.num_replicas)])


# Plain JAX around and inside.


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", lambda x: _context().all_reduce("SUM", x)),
        ("all_gather", lambda x: _context().all_gather(x, axis=0)),
        ("merge_call", lambda x: _context().merge_call(lambda strategy, x: x, args=(x,))),
    ],
)
def test_jit_in_an_eager_replica_says_to_use_function(pair: Any, name: str, call: Any) -> None:
    def replica_fn() -> Any:
        return jax.jit(call)(jnp.ones(2))

    with pytest.raises(RuntimeError, match=rf"{name}: called inside jax.jit.*@dx.function"):
        pair.run(replica_fn)
    assert pair.run(lambda: 1) == 1
    dx.function(lambda: pair.run(replica_fn))()


def test_jit_around_an_eager_run_says_to_use_function(pair: Any) -> None:
    def step(x: Any) -> Any:
        return pair.run(lambda x: _context().all_reduce("SUM", x), args=(x,))

    for wrapped in (jax.jit(step), jax.grad(lambda x: pair.reduce("MEAN", step(x), axis=None))):
        with pytest.raises(RuntimeError, match=r"strategy.run: called inside .*@dx.function"):
            wrapped(jnp.asarray(1.0))


def test_loops_and_branches_of_jax_run_in_replicas(case: Case) -> None:
    """What a replica computes differs from replica to replica; a loop's zeros do not."""
    variable = case.variable(2.0)

    def replica_fn(x: Any) -> Any:
        last, sums = jax.lax.scan(lambda c, xi: (c + xi * variable, c), jnp.zeros(()), x)
        chosen = jax.lax.cond(x[0] > 3, lambda: x, lambda: jnp.zeros_like(x))
        counted = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, 0 * x))
        added = jax.lax.fori_loop(0, 3, lambda i, c: c + x, jnp.zeros(x.shape))
        return last, sums, chosen, counted[1], added, _context().all_reduce("SUM", last)

    last, sums, chosen, counted, added, total = case.run(replica_fn, case.split(BATCH))
    pieces = list(BATCH.reshape(case.num_replicas, -1))
    close(case.parts(last), [2 * piece.sum() for piece in pieces])
    close(case.parts(sums), [2 * (np.cumsum(piece) - piece) for piece in pieces])
    close(case.parts(chosen), [piece * (piece[0] > 3) for piece in pieces])
    close(case.parts(counted), [3 * piece for piece in pieces])
    close(case.parts(added), [3 * piece for piece in pieces])
    close(case.parts(total), [2 * BATCH.sum()] * case.num_replicas)


def test_gradients_through_loops_in_replicas(case: Case) -> None:
    variable = case.variable(2.0, aggregation="MEAN")

    def replica_fn(x: Any) -> Any:
        def loss() -> Any:
            return jax.lax.scan(lambda c, xi: (c + xi * variable, None), jnp.zeros(()), x)[0]

        value, gradient = dx.value_and_grad(loss, variable)()
        variable.assign(gradient)
        return value, _context().all_reduce("SUM", gradient)

    value, total = case.run(replica_fn, case.split(BATCH))
    n = case.num_replicas
    close(case.parts(value), [2 * piece.sum() for piece in BATCH.reshape(n, -1)])
    close(case.parts(total), [BATCH.sum()] * n)
    close(variable, BATCH.sum() / n)

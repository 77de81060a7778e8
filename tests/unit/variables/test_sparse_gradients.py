"""Gradients of tables whose rows are looked up: sparse, and pushed as rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx

TABLE = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
IDS = np.array([[1, 15], [1, 4]])


@pytest.fixture(params=["sharded", "served"])
def where(request: pytest.FixtureRequest) -> Any:
    """A strategy whose tables are divided, or not."""
    return request.getfixturevalue("strategy" if request.param == "sharded" else "whole")


def _model(where: Any) -> tuple[Any, Any]:
    with where.scope():
        weights = np.arange(1, 4, dtype=np.float32).reshape(3, 1)
        return dx.Variable(TABLE, name="table"), dx.Variable(weights, name="w")


def _loss(table: Any, w: Any, ids: Any) -> Any:
    hidden = jnp.tanh(dx.embedding_lookup(table, ids)) @ jnp.asarray(w)
    return jnp.mean(hidden**2)


def _expected(ids: Any, loss: Any = _loss) -> Any:
    w = jnp.arange(1, 4, dtype=jnp.float32).reshape(3, 1)
    return jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(TABLE), w, ids)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_gradient_is_that_of_an_array(where: Any, compiled: bool) -> None:
    table, w = _model(where)
    step = dx.value_and_grad(lambda ids: _loss(table, w, ids), [table, w])
    loss, (grad, other) = (dx.function(step) if compiled else step)(IDS)
    want, (want_table, want_w) = _expected(IDS)
    assert isinstance(grad, dx.IndexedSlices)
    assert grad.dense_shape == grad.shape == (20, 3) and grad.dtype == np.float32
    assert grad.values.shape == (4, 3) and grad.indices.tolist() == [1, 15, 1, 4]
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(jnp.asarray(grad), want_table, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(other, want_w, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_several_lookups_of_one_table(where: Any, compiled: bool) -> None:
    def loss(table: Any, w: Any, ids: Any) -> Any:
        return _loss(table, w, ids) + jnp.sum(dx.embedding_lookup(table, ids[0] + 2) ** 3)

    table, w = _model(where)
    step = dx.value_and_grad(lambda ids: loss(table, w, ids), table)
    _, grad = (dx.function(step) if compiled else step)(IDS)
    _, (want, _) = _expected(IDS, loss)
    assert grad.values.shape == (6, 3)
    np.testing.assert_allclose(jnp.asarray(grad), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("first", ["rows", "whole"])
def test_a_table_that_is_also_read_as_a_whole(where: Any, compiled: bool, first: str) -> None:
    def loss(table: Any, w: Any, ids: Any) -> Any:
        if first == "rows":
            return _loss(table, w, ids) + jnp.sum(jnp.asarray(table) ** 2)
        return jnp.sum(jnp.asarray(table) ** 2) + _loss(table, w, ids)

    table, w = _model(where)
    step = dx.value_and_grad(lambda ids: loss(table, w, ids), table)
    _, grad = (dx.function(step) if compiled else step)(IDS)
    _, (want, _) = _expected(IDS, loss)
    assert isinstance(grad, jax.Array)
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6)


def test_the_function_runs_once(where: Any) -> None:
    table, w = _model(where)
    calls = []

    def loss(ids: Any) -> Any:
        calls.append(1)
        w.assign_add(jnp.ones((3, 1)))
        return _loss(table, w, ids)

    before = w.numpy()
    dx.value_and_grad(loss, [table, w])(IDS)
    assert len(calls) == 1
    np.testing.assert_array_equal(w.numpy(), before + 1)


def test_lookups_without_influence(where: Any) -> None:
    table, w = _model(where)

    def loss() -> Any:
        dx.embedding_lookup(table, [0])
        return jnp.sum(jnp.asarray(w))

    _, grad = dx.value_and_grad(loss, table)()
    assert isinstance(grad, dx.IndexedSlices) and grad.values.shape == (0, 3)
    np.testing.assert_array_equal(jnp.asarray(grad), np.zeros((20, 3)))

    def dense_too() -> Any:
        _ = table.read_value()
        return loss()

    _, zeros = dx.value_and_grad(dense_too, table)()
    _, untouched = dx.value_and_grad(lambda: jnp.sum(jnp.asarray(w)), table)()
    for grad in (zeros, untouched):
        np.testing.assert_array_equal(grad, np.zeros((20, 3)))


def test_inside_other_transformations(where: Any) -> None:
    table, w = _model(where)

    def loss(ids: Any) -> Any:
        def body(x: Any) -> Any:
            return jnp.sum(jnp.sin(x * dx.embedding_lookup(table, ids)))

        def loop(carry: Any, x: Any) -> Any:
            return carry + x * jnp.sum(jnp.asarray(w) ** 2), None

        return jax.checkpoint(body)(2.0) + jax.lax.scan(loop, 0.0, jnp.arange(3.0))[0]

    for step in (
        dx.value_and_grad(loss, [table, w]),
        dx.function(dx.value_and_grad(loss, [table, w])),
    ):
        _, (grad, other) = step(IDS)
        want = jax.grad(lambda t: jnp.sum(jnp.sin(2.0 * t[IDS])))(jnp.asarray(TABLE))
        np.testing.assert_allclose(jnp.asarray(grad), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(other, 6 * w.numpy(), rtol=1e-5)


def test_a_gradient_of_a_gradient(where: Any) -> None:
    table, _ = _model(where)

    def loss() -> Any:
        return jnp.sum(dx.embedding_lookup(table, [2, 7]) ** 3)

    def penalty() -> Any:
        _, inner = dx.value_and_grad(loss, table)()
        return jnp.sum(inner.values**2)

    _, grad = dx.value_and_grad(penalty, table)()
    rows = TABLE[[2, 7]]
    np.testing.assert_allclose(grad.values, 36 * rows**3, rtol=1e-5)


def test_ids_that_depend_on_what_is_differentiated(where: Any) -> None:
    table, w = _model(where)

    def loss() -> Any:
        best = jnp.argmax(jnp.asarray(w) * 2)
        return jnp.sum(dx.embedding_lookup(table, best) ** 2)

    for step in (
        dx.value_and_grad(loss, [table, w]),
        dx.function(dx.value_and_grad(loss, [table, w])),
    ):
        _, (grad, other) = step()
        assert grad.indices.tolist() == [2]
        np.testing.assert_allclose(grad.values, 2 * TABLE[[2]], rtol=1e-6)
        np.testing.assert_array_equal(other, np.zeros((3, 1)))


def test_rows_of_a_shard(strategy: Any) -> None:
    table, _ = _model(strategy)
    first, second = table.variables

    def loss() -> Any:
        return jnp.sum(dx.embedding_lookup(second, [0]) ** 2) + jnp.sum(table[3] ** 2)

    _, (one, two) = dx.value_and_grad(loss, [first, second])()
    np.testing.assert_allclose(one, np.where(np.arange(10)[:, None] == 3, 2 * TABLE[:10], 0))
    np.testing.assert_allclose(jnp.asarray(two)[0], 2 * TABLE[10], rtol=1e-6)
    _, grad = dx.value_and_grad(loss, table)()
    expected = np.zeros_like(TABLE)
    expected[[3, 10]] = 2 * TABLE[[3, 10]]
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


def test_integers_have_no_gradient(where: Any) -> None:
    with where.scope():
        table = dx.Variable(np.zeros((4, 2), np.int32), name="table")
    with pytest.raises(TypeError, match=r"'table'.*int32.*floating-point"):
        dx.value_and_grad(lambda: 1.0, table)


# Updates.


def _trained(where: Any, transformation: Any, compiled: bool, **settings: Any) -> Any:
    with where.scope():
        table, w = _model(where)
        optimizer = dx.Optimizer(transformation, **settings)

    def step(ids: Any) -> None:
        _, grads = dx.value_and_grad(lambda: _loss(table, w, ids), [table, w])()
        optimizer.apply_gradients(zip(grads, [table, w], strict=True))

    run = dx.function(step) if compiled else step
    for shift in range(4):
        where.run(run, args=(IDS + shift,))
    return table, w, optimizer


@cache
def _train_here(make: Callable[..., Any], **settings: Any) -> list[np.ndarray]:
    """Returns the table and the weights that one device gives."""
    strategy = dx.OneDeviceStrategy("CPU:0")
    table, w, _ = _trained(strategy, make(0.5), compiled=True, **settings)
    return [table.numpy(), w.numpy()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", [optax.sgd, optax.adagrad])
def test_updates_by_rows_equal_updates_of_the_whole(where: Any, compiled: bool, make: Any) -> None:
    """Of these two, a row that has no gradient stays as it is anyway."""
    served = _trained(where, make(0.5), compiled)
    for got, want in zip(served[:2], _train_here(make), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    assert int(served[2].iterations.numpy()) == 4


def test_gradients_that_are_accumulated_are_whole(where: Any) -> None:
    served = _trained(where, optax.sgd(0.5), True, gradient_accumulation_steps=2)
    here = _train_here(optax.sgd, gradient_accumulation_steps=2)
    np.testing.assert_allclose(served[0].numpy(), here[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_only_rows_are_pushed(strategy: Any, traffic: Any, compiled: bool) -> None:
    with strategy.scope():
        table = dx.Variable(np.ones((10_000, 8), np.float32))
        optimizer = dx.Optimizer(optax.adam(0.1))
    optimizer.build([table])

    def step(ids: Any) -> None:
        loss = lambda: jnp.sum(dx.embedding_lookup(table, ids))  # noqa: E731
        optimizer.minimize(loss, [table])

    run = dx.function(step) if compiled else step
    for ids, pushed in (([9000, 1, 9000], [[1], [4000, 4000]]), ([7, 7, 8], [[7, 7, 8]])):
        traffic.clear()
        run(np.array(ids))
        assert sorted(traffic.pushed_rows) == pushed
        assert traffic.pushed_bytes == 3 * 8 * 4
        assert not traffic.pulled
    changed = np.flatnonzero((table.numpy() != 1).any(axis=1))
    assert changed.tolist() == [1, 7, 8, 9000]


def test_lazy_adam_leaves_other_rows_alone(where: Any) -> None:
    table, _, optimizer = _trained(where, optax.adam(0.1), compiled=True)
    untouched = [0, 9, 10, 11, 12, 13, 14, 19]
    np.testing.assert_array_equal(table.numpy()[untouched], TABLE[untouched])
    slots = [slot for slot in optimizer.variables if slot.shape == table.shape]
    assert len(slots) == 2
    for slot in slots:
        assert not slot.numpy()[untouched].any() and slot.numpy()[1].all()


def test_sparse_gradients_of_variables_here() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        table = dx.Variable(np.zeros((4, 2), np.float32))
        optimizer = dx.Optimizer(optax.sgd(1.0))

    def replica() -> None:
        grad = dx.IndexedSlices(jnp.ones((2, 2)), jnp.array([3, 3]))
        optimizer.apply_gradients([(grad, table)])

    strategy.run(replica)
    expected = np.zeros((4, 2))
    expected[3] = -4
    np.testing.assert_array_equal(table.numpy(), expected)


def test_sparse_gradients_that_do_not_fit(where: Any) -> None:
    table, _ = _model(where)
    optimizer = dx.Optimizer(optax.sgd(1.0))
    good = dx.IndexedSlices(jnp.ones((2, 3)), jnp.array([3, 3]), (20, 3))
    with pytest.raises(ValueError, match=r"pair 0 .*not integers.*2 \* g"):
        optimizer.apply_gradients([(jax.tree.map(lambda x: x * 0.5, good), table)])
    with pytest.raises(ValueError, match=r"values of shape \(2, 4\) and indices of shape \(2,\)"):
        optimizer.apply_gradients([(dx.IndexedSlices(jnp.ones((2, 4)), good.indices), table)])
    with pytest.raises(ValueError, match=r"has shape \(21, 3\), but"):
        optimizer.apply_gradients([(dx.IndexedSlices(good.values, good.indices, (21, 3)), table)])
    with where.scope(), pytest.raises(ValueError, match=r"apply_gradients: ids\[1\] is 20, but"):
        optimizer.apply_gradients([(dx.IndexedSlices(good.values, jnp.array([3, 20])), table)])
    np.testing.assert_array_equal(table.numpy(), TABLE)


@pytest.mark.parametrize("outside", [-1, 20])
def test_rows_outside_a_table_of_this_process(outside: int) -> None:
    table, optimizer = dx.Variable(TABLE, name="table"), dx.Optimizer(optax.sgd(1.0))
    grad = dx.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, outside]))
    with pytest.raises(ValueError, match=rf"apply_gradients: ids\[1\] is {outside}, but .*'table'"):
        optimizer.apply_gradients([(grad, table)])
    np.testing.assert_array_equal(table.numpy(), TABLE)


@pytest.mark.parametrize("outside", [-1, 20])
def test_rows_outside_the_table_in_a_compiled_step(where: Any, outside: int) -> None:
    table, _ = _model(where)
    optimizer = dx.Optimizer(optax.sgd(1.0))

    @dx.function
    def step(ids: Any) -> None:
        optimizer.apply_gradients([(dx.IndexedSlices(jnp.ones((2, 3)), ids), table)])

    with where.scope():
        step(jnp.array([0, 0]))
        with pytest.raises(ValueError, match=rf"apply_gradients: ids\[1\] is {outside}, but"):
            step(jnp.array([0, outside]))
    np.testing.assert_array_equal(table.numpy()[0], TABLE[0] - 2)


def test_a_variable_in_two_pairs(where: Any) -> None:
    table, w = _model(where)
    optimizer = dx.Optimizer(optax.sgd(1.0))
    grad = jnp.ones((20, 3))
    _, part = table.row_shards[0]
    for again in {table, part}:
        pairs = [(grad, table), (None, table), (jnp.ones((3, 1)), w)]
        pairs.append((jnp.ones(again.shape), again))
        with where.scope(), pytest.raises(ValueError, match="is in the pairs 0 and 3"):
            optimizer.apply_gradients(pairs)
    with where.scope(), pytest.raises(ValueError, match=r"pair 0 has shape \(\), but"):
        optimizer.apply_gradients([(1.0, w)])


# The gradients themselves.


def test_computing_with_sparse_gradients() -> None:
    grad = dx.IndexedSlices(jnp.array([[1.0], [2.0]]), jnp.array([2, 2]), (3, 1))
    for scaled in (
        grad * 2,
        2 * grad,
        grad / 0.5,
        -grad * jnp.float32(-2),
        grad * dx.Variable(2.0),
    ):
        assert isinstance(scaled, dx.IndexedSlices)
        np.testing.assert_array_equal(jnp.asarray(scaled), [[0], [0], [6]])
    np.testing.assert_array_equal(grad + 1, [[1], [1], [4]])
    np.testing.assert_array_equal(grad * jnp.ones((3, 1)), [[0], [0], [3]])
    np.testing.assert_array_equal(grad / jnp.ones((3, 1)), [[0], [0], [3]])
    assert repr(grad) == "<dx.IndexedSlices of 2 rows of (3, 1)>"
    again = jax.jit(lambda g: g)(grad)
    assert isinstance(again, dx.IndexedSlices) and again.dense_shape == (3, 1)
    with pytest.raises(ValueError, match="dense_shape is missing"):
        jnp.asarray(dx.IndexedSlices(grad.values, grad.indices))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_may_leave_a_table_or_the_rest_alone(where: Any, compiled: bool) -> None:
    for value, wanted in zip(_train_some(where, compiled), _train_some_here(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def _train_some(place: Any, compiled: bool) -> list[np.ndarray]:
    table, w = _model(place)
    with place.scope():
        optimizer = dx.Optimizer(optax.adam(0.1))
    ones = np.ones((20, 3), np.float32), np.ones((3, 1), np.float32)
    for given in ([(None, table), (ones[1], w)], [(ones[0], table)], [(ones[1], w)]):

        def step(given: Any = given) -> None:
            place.run(lambda: optimizer.apply_gradients(given))

        (dx.function(step) if compiled else step)()
    return [np.asarray(variable.numpy()) for variable in (table, w, *optimizer.variables)]


@cache
def _train_some_here() -> list[np.ndarray]:
    return _train_some(dx.OneDeviceStrategy("CPU:0"), compiled=True)

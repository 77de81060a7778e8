"""Rows of a table: of one on servers only those that are asked for travel."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx

TABLE = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
IDS = [3, [1, 99], [[50, 49], [50, 0]], np.zeros((0,), np.int32), np.array([7], np.uint8)]


@pytest.fixture(params=["sharded", "served", "mirrored", "default", "array"])
def table(request: pytest.FixtureRequest) -> Any:
    """A table of each kind."""
    if request.param == "array":
        return TABLE
    where: Any = dx.get_strategy()
    if request.param == "mirrored":
        where = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    if request.param in ("sharded", "served"):
        where = request.getfixturevalue("strategy" if request.param == "sharded" else "whole")
    if request.param == "default":
        return dx.Variable(TABLE, name="table")
    with where.scope():
        return dx.Variable(TABLE, name="table")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("ids", IDS, ids=lambda ids: str(np.shape(ids)))
def test_rows_for_ids_of_any_shape(table: Any, ids: Any, compiled: bool) -> None:
    def look(ids: Any) -> Any:
        return dx.embedding_lookup(table, ids)

    ids = np.asarray(ids)
    rows = (dx.function(look) if compiled else look)(ids)
    assert rows.shape == (*ids.shape, 4) and rows.dtype == np.float32
    np.testing.assert_array_equal(rows, TABLE[ids])


def test_norms_are_limited(table: Any) -> None:
    norms = np.linalg.norm(TABLE[[[0, 1], [2, 3]]], axis=-1, keepdims=True)
    limit = float(np.median(norms))
    rows = dx.embedding_lookup(table, [[0, 1], [2, 3]], max_norm=limit)
    expected = TABLE[[[0, 1], [2, 3]]] * np.minimum(1, limit / norms)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_a_list_of_variables_is_one_table(strategy: Any) -> None:
    with strategy.scope():
        served = dx.Variable(TABLE)
    for parts in (served.variables, [dx.Variable(TABLE[:60]), dx.Variable(TABLE[60:])]):
        np.testing.assert_array_equal(dx.embedding_lookup(parts, [0, 99]), TABLE[[0, 99]])
    np.testing.assert_array_equal(dx.embedding_lookup([dx.Variable(TABLE)], 5), TABLE[5])
    np.testing.assert_array_equal(dx.embedding_lookup([served], 5), TABLE[5])
    for twice in ([served, served], [served, TABLE], [TABLE, jnp.asarray(TABLE)]):
        rows = dx.embedding_lookup(twice, [99, 100, 199])
        np.testing.assert_array_equal(rows, TABLE[[99, 0, 99]])
    np.testing.assert_array_equal(dx.embedding_lookup(TABLE.tolist(), [7]), TABLE[[7]])


def test_tables_whose_hashes_agree_are_not_compared_by_their_values(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        tables = [dx.Variable(TABLE), dx.Variable(2 * TABLE)]
    monkeypatch.setattr(type(tables[0]), "__hash__", lambda self: 1)

    look = dx.function(lambda: [dx.embedding_lookup(table, np.array([3])) for table in tables])

    np.testing.assert_array_equal(look()[1], 2 * TABLE[[3]])


def test_no_ids_in_a_list(table: Any) -> None:
    assert dx.embedding_lookup(table, []).shape == (0, 4)
    assert dx.embedding_lookup(table, [[], []]).shape == (2, 0, 4)


@pytest.mark.parametrize("ids", [[0, 100], [[1, -1]]], ids=str)
def test_ids_outside_the_table(table: Any, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"ids\[.*1\] is (100|-1), but .*table.* the rows 0 to 99"):
        dx.embedding_lookup(table, ids)


def test_ids_outside_the_table_in_a_compiled_step(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE, name="table")
    for fn in (
        lambda i: dx.embedding_lookup(table, i),
        lambda i: dx.embedding_lookup(table, i + 1),
    ):
        step = dx.function(fn)
        step(np.array([0]))
        with pytest.raises(ValueError, match=r"ids\[0\] is \d+, but sharded variable 'table'"):
            step(np.array([100]))
    here = dx.Variable(TABLE)
    rows = dx.function(lambda i: dx.embedding_lookup(here, i))(np.array([-1, 100, 0]))
    np.testing.assert_array_equal(rows, [[np.nan] * 4, [np.nan] * 4, TABLE[0]])


def test_what_is_not_an_id(table: Any) -> None:
    with pytest.raises(ValueError, match=r"data type float\d\d. Expected integers"):
        dx.embedding_lookup(table, [0.5])
    with pytest.raises(ValueError, match=r"data type float32. Expected integers"):
        dx.function(lambda i: dx.embedding_lookup(table, i))(jnp.ones(2))
    with pytest.raises(ValueError, match=r"ids=\[\[1\], \[2, 3\]\] is no array"):
        dx.embedding_lookup(table, [[1], [2, 3]])
    for norm in ("1", -1.0, 0, [1.0, 2.0], True):
        with pytest.raises(ValueError, match=rf"max_norm={re.escape(repr(norm))}\. Expected a"):
            dx.embedding_lookup(table, [1], max_norm=norm)


@pytest.mark.parametrize(
    "params", [None, [TABLE, TABLE[:, :3]], [TABLE, 1.0]], ids=["none", "columns", "scalar"]
)
def test_what_is_not_a_table(params: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)params=.{1,100} is not a table"):
        dx.embedding_lookup(params, [0])


def test_a_scalar_has_no_rows(strategy: Any) -> None:
    with strategy.scope():
        served = dx.Variable(1.0)
    for scalar in (served, dx.Variable(1.0), 1.0):
        with pytest.raises(ValueError, match="is a scalar; it has no rows"):
            dx.embedding_lookup(scalar, [0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_only_the_rows_travel(strategy: Any, traffic: Any, compiled: bool) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)
        bias = dx.Variable(1.0, name="bias")
    fn = lambda ids: dx.embedding_lookup(table, ids) + bias  # noqa: E731
    step = dx.function(fn) if compiled else fn
    for ids in ([10, 70, 20], [0, 1, 2]):
        step(np.array(ids))
        traffic.clear()
        np.testing.assert_array_equal(step(np.array(ids)), TABLE[ids] + 1)
        assert traffic.fetched_rows == ([[10, 20], [20]] if 70 in ids else [[0, 1, 2]])
        assert traffic.pulled == ["bias"]


def test_rows_are_new_at_each_call(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)
    step = dx.function(lambda ids: dx.embedding_lookup(table, ids))
    for number in range(3):
        table.scatter_update(dx.IndexedSlices(np.full((1, 4), number, np.float32), np.array([9])))
        np.testing.assert_array_equal(step(np.array([9])), np.full((1, 4), number))
    assert step.trace_count == 1


def test_ids_that_are_computed(strategy: Any, traffic: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)
        shift = dx.Variable(5, name="shift")

    @dx.function
    def step(x: Any) -> Any:
        return dx.embedding_lookup(table, (x * 2).astype(jnp.int32) + shift)

    for x in ([1.0, 3.0], [20.0, 2.0]):
        ids = [int(2 * each) + 5 for each in x]
        np.testing.assert_array_equal(step(np.array(x, np.float32)), TABLE[ids])
    assert step.trace_count == 1
    assert traffic.fetched_rows[-1] == [45, 9]


def test_a_list_of_numbers_as_an_argument(table: Any) -> None:
    step = dx.function(lambda ids: dx.embedding_lookup(table, ids))
    for ids in ([1, 2], [99, 50]):
        np.testing.assert_array_equal(step(ids), TABLE[ids])


def test_constant_ids(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)
    step = dx.function(lambda x: dx.embedding_lookup(table, [2, 3]) * x + table.sparse_read(1))
    np.testing.assert_allclose(step(2.0), 2 * TABLE[[2, 3]] + TABLE[1])


def test_independent_lookups_are_fetched_together(strategy: Any, monkeypatch: Any) -> None:
    together: list[int] = []
    fetch = strategy.source.pull_rows

    def noted(requests: Any) -> Any:
        together.append(len(requests))
        return fetch(requests)

    monkeypatch.setattr(strategy.source, "pull_rows", noted)
    with strategy.scope():
        users, items = dx.Variable(TABLE), dx.Variable(TABLE[::-1].copy())

    @dx.function
    def step(user: Any, item: Any) -> Any:
        first = dx.embedding_lookup(users, user)
        second = dx.embedding_lookup(items, item + 1)
        best = jnp.argmax(first + second, axis=-1)
        return second + dx.embedding_lookup(users, best) + dx.embedding_lookup(items, user)

    # The first call fetches once to be compiled, and again for its result.
    for user, item, num_fetches in ((3, 4, 2), (70, 20, 1)):
        best = np.argmax(TABLE[user] + TABLE[::-1][item + 1])
        expected = TABLE[::-1][item + 1] + TABLE[best] + TABLE[::-1][user]
        together.clear()
        np.testing.assert_allclose(step(np.int32(user), np.int32(item)), expected, rtol=1e-6)
        assert together == [3, 1] * num_fetches


def test_ids_of_an_iterator(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)
    batches = dx.data.Dataset.from_tensor_slices(np.arange(6)).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    step = dx.function(
        lambda it: strategy.run(lambda i: dx.embedding_lookup(table, i), (next(it),))
    )
    for start in (0, 2, 4):
        np.testing.assert_array_equal(step(iterator), TABLE[start : start + 2])


def test_donated_and_written_beside_a_lookup(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)
    count = dx.Variable(0)

    @dx.function(donate_argnums=1)
    def step(ids: Any, total: Any) -> Any:
        count.assign_add(1)
        return total + dx.embedding_lookup(table, ids).sum(axis=0)

    total = jnp.zeros(4)
    for _ in range(3):
        total = step(np.array([1, 2]), total)
    np.testing.assert_allclose(total, 3 * TABLE[[1, 2]].sum(axis=0), rtol=1e-6)
    assert int(count) == 3


def test_ids_inside_a_jax_transformation(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE, name="table")
    look = lambda i: dx.embedding_lookup(table, i)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"sharded variable 'table'.* is read inside jax.jit"):
        jax.jit(look)(jnp.array([0]))
    with pytest.raises(RuntimeError, match=r"computed inside jax.vmap.*jax.vmap\(fn\)\(rows\)"):
        dx.function(lambda i: jax.vmap(look)(i))(jnp.array([0]))


def test_what_jit_would_remember(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE, name="table")
    inner = jax.jit(lambda x: x + dx.embedding_lookup(table, [0]))
    with pytest.raises(RuntimeError, match=r"'table'.*is read inside jax.jit, in a dx.function"):
        dx.function(lambda x: inner(x))(1.0)


def test_a_lookup_in_the_middle_of_a_transformation(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(TABLE)

    @dx.function
    def step(ids: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return carry + dx.embedding_lookup(table, ids).sum(), None

        return jax.lax.scan(body, 0.0, None, length=3)[0]

    np.testing.assert_allclose(step(np.array([4, 5])), 3 * TABLE[[4, 5]].sum(), rtol=1e-5)

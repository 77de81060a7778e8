"""Rows and elements of a variable are written one by one, with TensorFlow's results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.parameter_server import Scatter
from distribax.types import WriteKind

VALUE = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
ROWS = np.array([[2, 2, 2], [3, 3, 3], [5, 5, 5]], np.float32)

# Computed by TensorFlow: rows 1, 1 and 3 written with ROWS.
BY_ROWS: dict[str, list[list[float]]] = {
    "add": [[9, 10, 11], [15, 16, 17]],
    "sub": [[-1, 0, 1], [5, 6, 7]],
    "max": [[4, 5, 6], [10, 11, 12]],
    "min": [[2, 2, 2], [5, 5, 5]],
    "mul": [[24, 30, 36], [50, 55, 60]],
    "div": [[4 / 6, 5 / 6, 1], [2, 2.2, 2.4]],
    "update": [[3, 3, 3], [5, 5, 5]],
}

# Computed by TensorFlow: [0, 1], again [0, 1], and [3, 2] written with 7, 9 and 1.
BY_ELEMENTS = {
    "add": (18, 13),
    "sub": (-14, 11),
    "max": (9, 12),
    "min": (2, 1),
    "update": (9, 1),
}


@pytest.fixture(params=["sharded", "served", "split", "local"])
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a table: in two shards or one, on servers or here."""

    def make_table(value: Any = VALUE) -> Any:
        if request.param == "local":
            return dx.Variable(value)
        if request.param == "split":
            return dx.ShardedVariable([dx.Variable(value[:3]), dx.Variable(value[3:])])
        fixture = "strategy" if request.param == "sharded" else "whole"
        with request.getfixturevalue(fixture).scope():
            return dx.Variable(value)

    return make_table


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_change(make: Any, compiled: bool) -> None:
    tables = {name: make() for name in BY_ROWS}
    others = {name: make() for name in BY_ELEMENTS}

    def step(indices: Any, rows: Any, places: Any, elements: Any) -> Any:
        for name, table in tables.items():
            write = getattr(table, f"scatter_{name}")
            assert write(dx.IndexedSlices(rows, indices)) is table
        for name, table in others.items():
            assert getattr(table, f"scatter_nd_{name}")(places, elements) is table
        return [table.read_value() for table in [*tables.values(), *others.values()]]

    places = np.array([[0, 1], [0, 1], [3, 2]])
    elements = np.array([7, 9, 1], np.float32)
    given = [jnp.asarray(each) for each in ([1, 1, 3], ROWS, places, elements)]
    seen = (dx.function(step) if compiled else step)(*given)
    expected = []
    for name in BY_ROWS:
        expected.append(VALUE.copy())
        expected[-1][[1, 3]] = BY_ROWS[name]
    for first, second in BY_ELEMENTS.values():
        expected.append(VALUE.copy())
        expected[-1][0, 1], expected[-1][3, 2] = first, second
    stored = [table.numpy() for table in [*tables.values(), *others.values()]]
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    np.testing.assert_allclose(stored, expected, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_batches_and_gathering(make: Any, compiled: bool) -> None:
    table = make()

    def step(indices: Any, values: Any, places: Any) -> Any:
        table.batch_scatter_update(dx.IndexedSlices(values, indices))
        return table.gather_nd(places), table.gather_nd(places[..., :1]), table.gather_nd([3, 2])

    indices = jnp.array([[0, 1], [1, 2], [0, 2], [2, 1]])
    values = jnp.array([[9, 8], [7, 6], [5, 4], [3, 2]], jnp.float32)
    places = jnp.array([[[0, 1], [3, 0]]])
    elements, rows, one = (dx.function(step) if compiled else step)(indices, values, places)
    expected = np.array([[9, 8, 3], [4, 7, 6], [5, 8, 4], [10, 2, 3]], np.float32)
    np.testing.assert_array_equal(table.numpy(), expected)
    np.testing.assert_array_equal(elements, [[8, 10]])
    np.testing.assert_array_equal(rows, expected[[[0, 3]]])
    assert float(one) == 3
    table.batch_scatter_update(dx.IndexedSlices(np.zeros((1, 3), np.float32), np.array([3])))
    np.testing.assert_array_equal(table.numpy()[3], 0)


def test_shapes_and_data_types(make: Any) -> None:
    table = make(np.array([[-7], [7], [8], [9]]))
    table.scatter_div(dx.IndexedSlices(np.array([[2], [-2]]), np.array([0, 1])))
    assert table.numpy().ravel().tolist() == [-3, -3, 8, 9]
    # Indices of any shape, and one number for all rows.
    table.scatter_add(dx.IndexedSlices(np.ones((2, 2, 1), int), np.array([[0, 1], [1, 2]])))
    table.scatter_mul(dx.IndexedSlices(np.asarray(2), np.array([0, 3])))
    table.scatter_nd_max([[0, 0], [3, 0]], 5)
    assert table.numpy().ravel().tolist() == [5, -1, 9, 18]
    small = make(jnp.ones((4, 2), jnp.bfloat16))
    small.scatter_max(dx.IndexedSlices(jnp.full((1, 2), 3, jnp.bfloat16), np.array([3])))
    small.scatter_nd_add([[3, 1]], jnp.ones(1, jnp.bfloat16))
    assert small.numpy().astype(float).tolist() == [[1, 1]] * 3 + [[3, 4]]


def test_what_does_not_fit(make: Any) -> None:
    table = make()
    with pytest.raises(ValueError, match=r"scatter_nd_add: indices\[1\] is \[0, 3\], which is no"):
        table.scatter_nd_add([[0, 0], [0, 3]], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"gather_nd: indices\[0\] is \[4, 0\]"):
        table.gather_nd([4, 0])
    with pytest.raises(ValueError, match=r"gather_nd: indices of shape \(1, 3\) name no places"):
        table.gather_nd([[0, 0, 0]])
    with pytest.raises(ValueError, match=r"scatter_nd_min: values of shape \(2,\).*\(1, 3\)"):
        table.scatter_nd_min([[0]], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"batch_scatter_update: indices of shape \(2, 1\)"):
        table.batch_scatter_update(dx.IndexedSlices(ROWS[:2, :1], np.array([[0], [0]])))
    np.testing.assert_array_equal(table.numpy(), VALUE)


def test_servers_refuse_elements_that_do_not_fit(whole: Any) -> None:
    with whole.scope():
        table = dx.Variable(VALUE, name="table")
    client, uid = whole.source.client, table.placement.specs[0].uid
    wrong = (np.array([[0, 3]]), np.ones(1)), (np.array([[0, 0, 0]]), np.ones(1))
    for indices, updates in (*wrong, (np.array([[0, 0]]), np.ones(2, np.float32))):
        operation = Scatter(uid, WriteKind.MAX, indices, updates.astype(np.float32))
        client.push({0: [operation]})
        with pytest.raises(dx.ParameterServerError, match="Elements of parameter 'table'"):
            client.flush()


def test_a_differentiated_function_sees_elements_it_wrote(make: Any) -> None:
    table = make()

    def loss() -> Any:
        table.scatter_nd_update([[1, 1]], [2.0])
        return jnp.sum(table.value())

    seen, _ = dx.value_and_grad(loss, table)()
    assert float(seen) == VALUE.sum() - 3
    taken, grad = dx.value_and_grad(lambda: 2 * table.gather_nd([[1, 1], [3, 0]]).sum(), table)()
    assert float(taken) == 24
    expected = np.zeros((4, 3))
    expected[1, 1] = expected[3, 0] = 2
    np.testing.assert_array_equal(np.asarray(jnp.asarray(grad)), expected)

"""A variable in several shards is used like one variable."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.execution import named_objects

VALUE = np.arange(15, dtype=np.float32).reshape(5, 3)


@pytest.fixture(params=["served", "local"])
def table(request: pytest.FixtureRequest) -> Any:
    """A sharded variable of 5 rows: on two servers, or made by hand of variables here."""
    if request.param == "served":
        strategy = request.getfixturevalue("strategy")
        with strategy.scope():
            return dx.Variable(VALUE, name="table")
    parts = [dx.Variable(VALUE[:3], name="a"), dx.Variable(VALUE[3:], name="b")]
    return dx.ShardedVariable(parts, name="table")


def test_what_it_is(table: Any) -> None:
    assert isinstance(table, dx.ShardedVariable)
    assert (table.shape, table.ndim, table.size, len(table)) == ((5, 3), 2, 15, 5)
    assert table.dtype == np.float32 and table.name == "table" and table.trainable
    assert table.aggregation is dx.VariableAggregation.NONE
    assert table.synchronization is dx.VariableSynchronization.AUTO
    assert [part.shape for part in table] == [(3, 3), (2, 3)]
    assert list(table) == table.variables
    text = "<dx.ShardedVariable 'table' shape=(5, 3) dtype=float32, 2 shards of 3, 2 rows>"
    assert repr(table) == str(table) == text


def test_shards_are_named_and_spread(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(VALUE, name="v")
        unnamed = dx.Variable(VALUE)
    assert [part.name for part in v] == ["v/part_0:0", "v/part_1:0"]
    assert unnamed.name == "Variable"
    assert len(set(v.devices)) == 2
    assert v.distribute_strategy is strategy


def test_reading(table: Any) -> None:
    for value in (table.numpy(), table.read_value(), table.value(), jnp.asarray(table), table + 0):
        np.testing.assert_array_equal(value, VALUE)
    np.testing.assert_array_equal(np.asarray(table), VALUE)
    np.testing.assert_array_equal(jnp.ones((1, 5)) @ table, VALUE.sum(0, keepdims=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_writing(table: Any, compiled: bool) -> None:
    def step(x: Any) -> Any:
        table.assign(x * 2)
        table.assign_add(x)
        table.assign_sub(jnp.ones(()))
        return table.read_value()

    seen = (dx.function(step) if compiled else step)(jnp.asarray(VALUE))
    np.testing.assert_array_equal(seen, 3 * VALUE - 1)
    np.testing.assert_array_equal(table.numpy(), 3 * VALUE - 1)
    assert table.assign(VALUE) is table


INDICES: list[Any] = [
    2, -1, np.int64(4), slice(1, 4), slice(None, None, -2), slice(4, 4), slice(None), ...,
    None, (slice(1, 4), 1), (3, 2), (-1, slice(0, 2)), (slice(None), 1), (slice(0, 4, 3), None),
    np.array([3, 0, -1]), [1, 1], jnp.array([4, 2]), np.array([True, False, True, False, True]),
    (np.array([0, 4]), slice(1, 3)), np.array([[0, 4], [1, 1]]),
    (np.array([0, 4]), np.array([1, 2])), (np.array([[0], [4]]), [1, 2]), (slice(1, 4), [2, 0]),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_that_of_an_array(table: Any, index: Any) -> None:
    expected = VALUE[np.asarray(index) if isinstance(index, (list, jax.Array)) else index]
    np.testing.assert_array_equal(table[index], expected)


def test_indexing_inside_a_compiled_step(table: Any) -> None:
    step = dx.function(lambda i: (table[1:4], table[-1], table[i]))
    for got, want in zip(step(jnp.int32(2)), (VALUE[1:4], VALUE[-1], VALUE[2]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_index_that_there_is_not(table: Any) -> None:
    for index in (5, -6, [0, 7]):
        with pytest.raises(IndexError, match="which has the rows 0 to 4"):
            table[index]


def test_a_slice_fetches_its_rows_only(strategy: Any, traffic: Any) -> None:
    with strategy.scope():
        v = dx.Variable(VALUE)
    v[2:4]
    assert traffic.fetched_rows == [[2], [0]] and not traffic.pulled


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_scattering(table: Any, compiled: bool) -> None:
    def step(indices: Any, rows: Any) -> Any:
        assert table.scatter_add(dx.IndexedSlices(rows, indices)) is table
        table.scatter_sub(dx.IndexedSlices(2 * rows, indices))
        table.scatter_update(dx.IndexedSlices(rows[:1], indices[:1]))
        return table.read_value()

    expected = VALUE.copy()
    expected[2] -= 2
    expected[4] = 1
    indices = jnp.array([4, 2, 2], jnp.int8)
    seen = (dx.function(step) if compiled else step)(indices, jnp.ones((3, 3)))
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(table.numpy(), expected)
    np.testing.assert_array_equal(table.sparse_read([2, 4]), expected[[2, 4]])


def test_scattering_sends_its_rows_only(strategy: Any, traffic: Any) -> None:
    with strategy.scope():
        v = dx.Variable(np.zeros((1000, 4), np.float32))
    v.scatter_add(dx.IndexedSlices(np.ones((3, 4), np.float32), np.array([999, 0, 1])))
    assert sorted(traffic.pushed_rows) == [[0, 1], [499]]
    assert traffic.pushed_bytes == 3 * 4 * 4


def test_order_of_writes_in_a_compiled_step(table: Any) -> None:
    @dx.function
    def step() -> Any:
        table.assign_add(jnp.ones((5, 3)))
        table.scatter_update(dx.IndexedSlices(jnp.zeros((1, 3)), jnp.array([4])))
        table.assign_add(jnp.ones((5, 3)))
        return dx.embedding_lookup(table, [0, 4])

    expected = VALUE + 2
    expected[4] = 1
    np.testing.assert_array_equal(step(), expected[[0, 4]])
    np.testing.assert_array_equal(table.numpy(), expected)


def test_rows_written_in_a_differentiated_function(table: Any) -> None:
    def loss() -> Any:
        table.scatter_update(dx.IndexedSlices(jnp.full((1, 3), 2.0), jnp.array([1])))
        return jnp.sum(table.value() ** 2)

    seen, grad = dx.value_and_grad(loss, table)()
    expected = VALUE.copy()
    expected[1] = 2
    assert float(seen) == np.sum(expected**2)
    np.testing.assert_array_equal(table.numpy(), expected)
    # As in TensorFlow, what is read after a write counts.
    np.testing.assert_array_equal(grad, 2 * expected)


def test_wrong_values(table: Any) -> None:
    with pytest.raises(ValueError, match=r"assign: a value of shape \(5,\) does not fit sharded"):
        table.assign(np.zeros(5))
    with pytest.raises(ValueError, match=r"assign: a value of shape \(\) does not fit"):
        table.assign(1.0)
    with pytest.raises(ValueError, match="differs per replica"):
        table.assign(dx.PerReplica([VALUE, VALUE]))
    with pytest.raises(TypeError, match=r"scatter_add: sparse_delta=1.*IndexedSlices"):
        table.scatter_add(1)
    with pytest.raises(ValueError, match=r"values of shape \(1, 2\) with indices of shape \(1,\)"):
        table.scatter_add(dx.IndexedSlices(np.zeros((1, 2), np.float32), np.array([0])))
    with pytest.raises(ValueError, match=r"scatter_update: values of data type complex64"):
        table.scatter_update(dx.IndexedSlices(np.zeros((1, 3), np.complex64), np.array([0])))
    with pytest.raises(ValueError, match=r"scatter_sub: ids\[0\] is 5, but sharded variable"):
        table.scatter_sub(dx.IndexedSlices(np.zeros((1, 3), np.float32), np.array([5])))
    np.testing.assert_array_equal(table.numpy(), VALUE)


def test_rows_of_a_transformation_cannot_be_sent(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(VALUE)
    write = jax.jit(lambda rows: v.scatter_add(dx.IndexedSlices(rows, np.array([0]))).shape)
    with pytest.raises(RuntimeError, match=r"scatter_add.*Use @dx.function"):
        write(jnp.ones((1, 3)))
    ids = jax.jit(lambda i: v.scatter_add(dx.IndexedSlices(np.ones((1, 3)), i)).shape)
    with pytest.raises(RuntimeError, match=r"scatter_add.*Use @dx.function"):
        ids(jnp.array([0]))


def test_ids_that_a_compiled_step_computes_are_checked_when_sent(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(VALUE)
    step = dx.function(lambda i: v.scatter_add(dx.IndexedSlices(jnp.ones((1, 3)), i)).shape)
    with pytest.raises(ValueError, match=r"ids\[0\] is 9, but sharded variable"):
        step(jnp.array([9]))
    np.testing.assert_array_equal(v.numpy(), VALUE)


def test_what_shards_must_be() -> None:
    a, b = dx.Variable(np.zeros((2, 3))), dx.Variable(np.zeros((2, 4)))
    for wrong in ([], a, [a, 1], ()):
        with pytest.raises(
            TypeError, match=r"(?s)ShardedVariable: variables=.*list of dx.Variable"
        ):
            dx.ShardedVariable(wrong)
    with pytest.raises(ValueError, match="the same shape but for the first dimension"):
        dx.ShardedVariable([a, b])
    with pytest.raises(ValueError, match="the same data type"):
        dx.ShardedVariable([a, dx.Variable(np.zeros((2, 3), np.int32))])
    with pytest.raises(ValueError, match="has a scalar"):
        dx.ShardedVariable([dx.Variable(1.0)])


def test_shards_of_two_strategies(strategy: Any) -> None:
    with strategy.scope():
        (served, _) = dx.Variable(VALUE)
    with pytest.raises(ValueError, match="the same strategy"):
        dx.ShardedVariable([served, dx.Variable(VALUE)])


def test_small_and_colocated_variables_stay_whole(strategy: Any) -> None:
    with strategy.scope():
        scalar = dx.Variable(1.0)
        one = dx.Variable(np.zeros((1, 9), np.float32), None, "one")
        v = dx.Variable(VALUE)
        with strategy.extended.colocate_vars_with(v.variables[1]):
            beside = dx.Variable(VALUE)
        with strategy.extended.colocate_vars_with(v):
            first = dx.Variable(VALUE)
    assert first.device == v.variables[0].device
    for variable in (scalar, one, beside, first):
        assert isinstance(variable, dx.Variable)
    assert beside.device == v.variables[1].device
    assert one.name == "one:0"


def test_how_it_is_created(strategy: Any) -> None:
    calls = []

    def value() -> Any:
        calls.append(1)
        return np.ones((4, 2), np.int32)

    with strategy.scope():
        v = dx.Variable(value, False, "v", jnp.float32, aggregation="SUM", shape=(4, 2))
        with pytest.raises(ValueError, match=r"shape=\(4,\), but its initial value"):
            dx.Variable(np.ones((4, 2)), shape=(4,))
        with pytest.raises(ValueError, match="initial_value of 'x' is missing"):
            dx.Variable(name="x")
        with pytest.raises(TypeError, match="positional"):
            dx.Variable(1.0, True, "x", None, "too many")
    assert len(calls) == 1 and v.dtype == np.float32 and not v.trainable
    assert v.aggregation is dx.VariableAggregation.SUM
    assert all("test_sharded_variable.py" in part.described for part in v)


def test_it_is_sent_by_its_shards(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(VALUE, name="v")
    with named_objects.ship_to(strategy):
        assert pickle.loads(pickle.dumps(v)) is v
        sent = pickle.dumps((v, v.variables[0]))
    del v
    again, first = pickle.loads(sent)
    assert again.name == "v" and again.variables[0] is first
    np.testing.assert_array_equal(again.numpy(), VALUE)


def _trained(where: Any, transformation: Any, compiled: bool) -> list[np.ndarray]:
    with where.scope():
        a, b = dx.Variable(VALUE, name="a"), dx.Variable(np.ones(3, np.float32), name="b")
        optimizer = dx.Optimizer(transformation)

    def step(x: Any) -> None:
        loss = lambda: jnp.sum((a.value() * x - b.value()) ** 2)  # noqa: E731
        _, grads = dx.value_and_grad(loss, [a, b])()
        optimizer.apply_gradients(zip(grads, [a, b], strict=True))

    step = dx.function(step) if compiled else step
    for x in (0.1, 0.2, 0.3):
        where.run(step, args=(jnp.float32(x),))
    return [variable.numpy() for variable in (a, b, *optimizer.variables)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
# Three shards of different sizes, on two servers.
@pytest.mark.parametrize(
    "num_shards",
    [pytest.param(2, marks=pytest.mark.thorough), 3, pytest.param(5, marks=pytest.mark.thorough)],
)
def test_dense_training_equals_one_device(strategy: Any, compiled: bool, num_shards: int) -> None:
    strategy.variable_partitioner = dx.partitioners.FixedShardsPartitioner(num_shards)
    sharded = _trained(strategy, optax.adam(0.1), compiled)
    expected = _trained(dx.OneDeviceStrategy("CPU:0"), optax.adam(0.1), compiled)
    for got, want in zip(sharded, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_training_shards_of_this_process() -> None:
    value = dx.ShardedVariable([dx.Variable(VALUE[:3]), dx.Variable(VALUE[3:])])
    optimizer = dx.Optimizer(optax.sgd(0.5))
    optimizer.minimize(lambda: jnp.sum(dx.embedding_lookup(value, [4, 0, 4])), [value])
    expected = VALUE.copy()
    np.subtract.at(expected, [4, 0, 4], 0.5)
    np.testing.assert_allclose(value.numpy(), expected)


def test_state_that_cannot_be_divided(strategy: Any) -> None:
    with strategy.scope():
        table = dx.Variable(np.ones((256, 256), np.float32), name="table")
        optimizer = dx.Optimizer(optax.adafactor(0.1))
    with pytest.raises(ValueError, match=r"cannot be divided like its shards.*partitioner"):
        optimizer.build([table])


def test_each_shard_has_an_initial_value_of_its_own(strategy: Any) -> None:
    calls: list[dict[str, Any]] = []

    def make(shape: Any, dtype: Any = None, scale: float = 2.0, **partition: Any) -> Any:
        calls.append({"shape": shape, "dtype": dtype, **partition})
        first = partition["partition_offset"][0]
        rows = np.arange(partition["partition_shape"][0])[:, None] + first
        return np.broadcast_to(rows * scale, partition["partition_shape"])

    settings: dict[str, Any] = {"shape": (5, 3), "dtype": np.float32}
    with strategy.scope():
        table = dx.Variable(make, name="table", trainable=False, **settings)
        ignored = dx.Variable(lambda **_: VALUE, **settings)
        named = dx.Variable(
            lambda partition_shape, partition_offset: np.ones(partition_shape, int), shape=(5,)
        )
    assert [part.name for part in table] == ["table/part_0:0", "table/part_1:0"]
    assert not table.trainable and table.dtype == np.float32
    np.testing.assert_array_equal(table.numpy(), np.arange(5)[:, None] * [2.0, 2.0, 2.0])
    assert calls == [
        {**settings, "partition_shape": (3, 3), "partition_offset": (0, 0)},
        {**settings, "partition_shape": (2, 3), "partition_offset": (3, 0)},
    ]
    np.testing.assert_array_equal(ignored.numpy(), VALUE)
    assert [part.shape for part in named] == [(3,), (2,)] and named.dtype == np.int32
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"asked for.*\(3, 3\).*has shape \(1,\)"),
    ):
        dx.Variable(lambda **_: np.ones(1), **settings)


def test_the_same_initial_values_where_nothing_is_divided(strategy: Any) -> None:
    def make(partition_shape: Any, partition_offset: Any, dtype: Any) -> Any:
        assert partition_offset == (0, 0)
        return np.ones(partition_shape, dtype)

    settings: dict[str, Any] = {"shape": (5, 3), "dtype": jnp.bfloat16}
    strategy.variable_partitioner = dx.partitioners.MinSizePartitioner(max_shards=2)
    with strategy.scope():
        served = dx.Variable(make, **settings)
    for variable in (served, dx.Variable(make, **settings)):
        assert isinstance(variable, dx.Variable)
        assert (variable.shape, variable.dtype) == ((5, 3), jnp.bfloat16)
    # A function that does not tell what it takes.
    assert float(dx.Variable(functools.partial(max, 1.0, 2.0), shape=())) == 2


def test_its_average_is_divided_alike(table: Any) -> None:
    ema = dx.train.ExponentialMovingAverage(0.5)
    ema.apply([table])
    table.assign_add(jnp.full((), 2.0))
    dx.function(lambda: ema.apply([table]))()
    average = ema.average(table)
    np.testing.assert_array_equal(average.numpy(), VALUE + 1)
    assert [part.shape for part in average] == [part.shape for part in table]
    assert [part.device for part in average] == [part.device for part in table]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ema)).variables[0].numpy(), VALUE + 1)


def test_averages_and_generators_are_saved(tmp_path: Any) -> None:
    v, ema, generator = (
        dx.Variable(1.0),
        dx.train.ExponentialMovingAverage(0.5),
        dx.random.Generator(1),
    )
    ema.apply([v])
    generator.key()
    checkpoint = dx.Checkpoint(ema=ema, generator=generator)
    path = checkpoint.write(str(tmp_path / "c"))
    expected = generator.normal()
    v.assign(3.0)
    ema.apply([v])
    checkpoint.restore(path)
    assert float(ema.average(v)) == 1.0 and float(generator.normal()) == float(expected)

"""Document 003 (the tower API), by today's names: where values are, and the update pattern."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from tests.seeds.conftest import Decorator
from tests.seeds.shim import contents, tf


@pytest.fixture
def central() -> dx.CentralStorageStrategy:
    return tf.distribute.CentralStorageStrategy(["GPU:0", "GPU:1"], parameter_device="CPU:2")


def _t(strategy: dx.Strategy, *pieces: Any) -> Any:
    """A value of locality T: different for each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(pieces[ctx.replica_id_in_sync_group])
    )


def _devices(value: dx.DistributedValues) -> list[Any]:
    return [next(iter(piece.devices())) for piece in value.values]


# Creating variables.


def test_colocate_vars_with_a_variable(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        var1 = tf.Variable(1.0)
        with strategy.extended.colocate_vars_with(var1):
            # var2 and var3 will be created on the same device(s) as var1
            var2 = tf.Variable(2.0)
            var3 = tf.Variable(3.0)

        seen: list[tuple[float, float, float]] = []

        def fn(v1: Any, v2: Any, v3: Any) -> None:
            # operates on v1 from var1, v2 from var2, and v3 from var3
            seen.append((float(v1), float(v2), float(v3)))

        # `fn` runs on every device `v1` is on, `v2` and `v3` will be there too.
        strategy.extended.update(var1, fn, args=(var2, var3))
    assert var1.devices == var2.devices == var3.devices
    assert seen == [(1.0, 2.0, 3.0)] * 2


def test_colocate_vars_with_in_a_replica(central: dx.CentralStorageStrategy) -> None:
    with central.scope():
        v1 = tf.Variable(1.0)

    def replica_fn() -> Any:
        with central.extended.colocate_vars_with(v1):
            return tf.Variable(2.0)

    v2 = central.run(replica_fn)
    assert v2.devices == v1.devices == (jax.devices()[2],)


def test_colocate_vars_with_is_used_inside_the_scope_only(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        v = tf.Variable(1.0)
    with (
        pytest.raises(RuntimeError, match=r"inside `with strategy\.scope\(\):`"),
        strategy.extended.colocate_vars_with(v),
    ):
        pass


def test_variables_of_non_slot_devices(central: dx.CentralStorageStrategy) -> None:
    with central.scope():
        v = tf.Variable(1.0)
        non_slot_devices = central.extended.non_slot_devices([v])
        with central.extended.colocate_vars_with(non_slot_devices):
            beta = tf.Variable(0.5)
        assert beta.devices == v.devices
        result = central.extended.update_non_slot(
            non_slot_devices, lambda x: float(beta.assign(beta * x)), args=(0.5,)
        )
    assert result == 0.25
    assert float(beta) == 0.25


def test_update_non_slot_runs_once_for_each_of_the_devices(strategy: dx.MirroredStrategy) -> None:
    devices = strategy.extended.non_slot_devices([])
    assert devices == strategy.extended.parameter_devices
    with strategy.scope():
        with strategy.extended.colocate_vars_with(devices):
            beta = tf.Variable(0.5)
        calls: list[float] = []

        def fn(x: Any) -> None:
            calls.append(float(x))
            beta.assign(beta * x)

        strategy.extended.update_non_slot(devices, fn, args=(jnp.asarray(0.5),))
    assert calls == [0.5, 0.5]
    assert [float(copy) for copy in beta.values] == [0.25, 0.25]


def test_non_slot_devices_of_the_default_strategy_need_the_variables() -> None:
    extended = tf.distribute.get_strategy().extended
    b, a = tf.Variable(0.0, name="b"), tf.Variable(0.0, name="a")
    assert extended.non_slot_devices([b, a]) is a
    with pytest.raises(ValueError, match="var_list is empty"):
        extended.non_slot_devices([])


# Broadcasting, reducing, running, fetching.


def test_an_iterator_gives_values_of_locality_t(strategy: dx.MirroredStrategy) -> None:
    def dataset_fn(_: dx.InputContext) -> Any:
        return tf.data.Dataset.from_tensors([[1.0]]).repeat()

    with strategy.scope():
        distributed_dataset = strategy.distribute_datasets_from_function(dataset_fn)
        iterator = distributed_dataset.make_one_shot_iterator()
        batch = iterator.get_next()
        replica_results = strategy.run(lambda x: x + 1, args=(batch,))
    iterator.close()
    assert isinstance(batch, dx.PerReplica)
    assert contents(replica_results) == [[[2.0]], [[2.0]]]


def test_broadcast_mirrors_to_the_worker_devices(central: dx.CentralStorageStrategy) -> None:
    mirrored = central.extended.broadcast_to(jnp.asarray([1.0, 2.0]))
    assert isinstance(mirrored, dx.Mirrored)
    assert contents(mirrored) == [[1.0, 2.0]] * 2
    assert _devices(mirrored) == jax.devices()[:2]


def test_broadcast_to_the_devices_of_a_variable(central: dx.CentralStorageStrategy) -> None:
    with central.scope():
        v = tf.Variable(0.0)
    mirrored = central.extended.broadcast_to(jnp.asarray(1.0), v)
    assert isinstance(mirrored, dx.Mirrored)
    assert _devices(mirrored) == [jax.devices()[2]]


@pytest.mark.parametrize("name", ["strategy", "central"])
def test_run_may_use_t_and_m_and_any_variable(
    name: str, request: pytest.FixtureRequest, execution: Decorator
) -> None:
    strategy = request.getfixturevalue(name)
    with strategy.scope():
        v = tf.Variable(100.0)
    outside = tf.Variable(1000.0)
    mirrored = strategy.extended.broadcast_to(jnp.asarray(10.0))

    @execution
    def fn(t: Any, m: Any) -> Any:
        return t + m + v + outside

    result = strategy.run(fn, args=(_t(strategy, 1.0, 2.0), mirrored))
    assert contents(result) == [1111.0, 1112.0]


@pytest.mark.parametrize(("method", "expected"), [("sum", 3.0), ("mean", 1.5)])
def test_reduce_of_t_is_mirrored_where_the_value_is(
    strategy: dx.MirroredStrategy, method: str, expected: float
) -> None:
    t = _t(strategy, 1.0, 2.0)
    reduced = strategy.extended.reduce_to(method, t, destinations=None)
    assert isinstance(reduced, dx.Mirrored)
    assert contents(reduced) == [expected] * 2
    assert _devices(reduced) == _devices(t)


@pytest.mark.parametrize("name", ["strategy", "central"])
def test_reduce_to_a_variable_is_mirrored_like_the_variable(
    name: str, request: pytest.FixtureRequest
) -> None:
    strategy = request.getfixturevalue(name)
    with strategy.scope():
        v = tf.Variable(0.0)
    reduced = strategy.extended.reduce_to("sum", _t(strategy, 1.0, 2.0), v)
    assert float(reduced) == 3.0
    assert tuple(_devices(reduced)) == v.devices


def test_reduce_to_named_devices(strategy: dx.MirroredStrategy) -> None:
    t = _t(strategy, 1.0, 2.0)
    one = strategy.extended.reduce_to("sum", t, "CPU:3")
    assert one.devices() == {jax.devices()[3]}
    several = strategy.extended.reduce_to("sum", t, ["CPU:1", "CPU:3"])
    assert _devices(several) == [jax.devices()[1], jax.devices()[3]]
    assert contents(several) == [3.0, 3.0]


def test_batch_reduce_gives_one_mirrored_value_a_pair(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    with strategy.scope():
        a, b = tf.Variable(0.0), tf.Variable([0.0, 0.0])

    def merge_fn(strategy: dx.Strategy, ta: Any, tb: Any) -> list[Any]:
        reduced = strategy.extended.batch_reduce_to("mean", [(ta, a), (tb, b)])
        assert [type(value) for value in reduced] == [dx.Mirrored, dx.Mirrored]
        return reduced

    @execution
    def fn(ta: Any, tb: Any) -> Any:
        return tf.distribute.get_replica_context().merge_call(merge_fn, args=(ta, tb))

    ta, tb = _t(strategy, 1.0, 2.0), _t(strategy, [1.0, 2.0], [3.0, 4.0])
    first, second = strategy.run(fn, args=(ta, tb))
    assert contents(first) == [1.5, 1.5]
    assert contents(second) == [[2.0, 3.0]] * 2


def test_fetch_copies_any_locality_to_the_host(
    strategy: dx.MirroredStrategy, central: dx.CentralStorageStrategy
) -> None:
    for distribution in (strategy, central):
        with distribution.scope():
            v = tf.Variable([1.0, 2.0])
        mirrored = distribution.extended.broadcast_to(jnp.asarray(3.0))
        assert np.asarray(v).tolist() == [1.0, 2.0]
        assert float(mirrored) == 3.0
        assert f"{mirrored:.1f}" == "3.0"
        assert np.asarray(_t(distribution, 4.0, 5.0)).tolist() == [4.0, 5.0]


# update.


def test_update_runs_on_every_device_of_the_variable(
    strategy: dx.MirroredStrategy, central: dx.CentralStorageStrategy
) -> None:
    for distribution, copies in ((strategy, 2), (central, 1)):
        with distribution.scope():
            var = tf.Variable(1.0)
        amount = distribution.extended.broadcast_to(jnp.asarray(2.0), var)
        seen: list[tuple[float, float]] = []

        def fn(v: Any, x: Any, *, scale: float, seen: list[Any] = seen) -> Any:
            seen.append((float(v), float(x)))
            v.assign_add(x * scale)
            return v

        merged = distribution.extended.update(var, fn, args=(amount,), kwargs={"scale": 10.0})
        # Mirrored arguments were unwrapped, and the merged result is the variable.
        assert seen == [(1.0, 2.0)] * copies
        assert merged is var
        assert [float(copy) for copy in var.values] == [21.0] * copies


def test_update_merges_results_unless_told_otherwise(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        var = tf.Variable(1.0)
    merged = strategy.extended.update(var, lambda v: v + 1)
    assert contents(merged) == [2.0, 2.0]
    apart = strategy.extended.update(var, lambda v: v + 1, group=False)
    assert isinstance(apart, tuple)
    assert list(map(float, apart)) == [2.0, 2.0]


def test_update_refuses_values_that_differ_per_replica(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        var = tf.Variable(1.0)
    with pytest.raises(ValueError, match="an argument differs per replica"):
        strategy.extended.update(var, lambda v, x: v.assign(x), args=(_t(strategy, 1.0, 2.0),))
    with pytest.raises(ValueError, match="an argument differs per replica"):
        strategy.extended.update(var, tf.Variable.assign, kwargs={"value": _t(strategy, 1.0, 2.0)})


# The standard pattern for updating variables.


def _gradients(v: Any, x: Any) -> Any:
    _, grad = dx.value_and_grad(lambda x: jnp.sum(v * v * x), v)(x)
    return grad


@pytest.mark.parametrize("name", ["strategy", "central"])
def test_standard_pattern_by_hand_and_by_the_optimizer(
    name: str, request: pytest.FixtureRequest, execution: Decorator
) -> None:
    d = request.getfixturevalue(name)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)
    with d.scope():
        by_hand, automatic = tf.Variable(1.0), tf.Variable(1.0)
        optimizer = dx.Optimizer(optax.sgd(0.01))

    @execution
    def step_by_hand(x: Any) -> None:
        # 2. Define each replica up to the point of getting the gradients.
        t = d.run(lambda x: _gradients(by_hand, x), args=(x,))
        # 3. Sum them into values with the locality of the variable.
        total = d.extended.reduce_to("sum", t, by_hand)
        # 4. Update the variable.
        d.extended.update(by_hand, lambda v, g: v.assign_sub(0.01 * g), args=(total,))

    def replica_fn(x: Any) -> None:
        optimizer.apply_gradients([(_gradients(automatic, x), automatic)])

    @execution
    def step_automatic(x: Any) -> None:
        d.run(replica_fn, args=(x,))

    # 1. Wrap the data set and create an iterator.
    for x in d.experimental_distribute_dataset(dataset):
        step_by_hand(x)
        step_automatic(x)
    expected = 1.0 * (1 - 2 * 0.01 * 3) * (1 - 2 * 0.01 * 7)
    assert float(by_hand) == pytest.approx(expected, rel=1e-6)
    assert float(automatic) == pytest.approx(expected, rel=1e-6)
    assert all(float(copy) == float(automatic) for copy in automatic.values)


def test_optimizer_applied_in_the_cross_replica_context(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        v = tf.Variable(1.0)
        optimizer = dx.Optimizer(optax.sgd(0.5))
        grads = strategy.run(lambda x: _gradients(v, x), args=(_t(strategy, 0.25, 0.5),))
        assert contents(grads) == [0.5, 1.0]
        optimizer.apply_gradients([(grads, v)])
    assert [float(copy) for copy in v.values] == [0.25, 0.25]


def test_an_all_reduce_in_the_middle_of_the_replica(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    @execution
    def fn(x: Any) -> Any:
        ctx = tf.distribute.get_replica_context()
        mean = ctx.merge_call(
            lambda d, t: d.extended.reduce_to("mean", t, destinations=None), args=(x,)
        )
        return x - mean

    assert contents(strategy.run(fn, args=(_t(strategy, 1.0, 4.0),))) == [-1.5, 1.5]


# Replica-local variables (tower_local_var_scope).


def _local_variable(method: str, initial: Any = 0.0) -> Any:
    return tf.Variable(
        initial,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation[method.upper()],
    )


@pytest.mark.parametrize(("method", "expected"), [("sum", 3.0), ("mean", 1.5)])
def test_replica_local_variables_are_aggregated_when_fetched(
    strategy: dx.MirroredStrategy, execution: Decorator, method: str, expected: float
) -> None:
    with strategy.scope():
        local = _local_variable(method)
    assert not local.trainable

    @execution
    def fn(x: Any) -> Any:
        local.assign_add(x)
        return local.read_value()

    assert contents(strategy.run(fn, args=(_t(strategy, 1.0, 2.0),))) == [1.0, 2.0]
    assert [float(copy) for copy in local.values] == [1.0, 2.0]
    assert float(local) == expected


def test_replica_local_variables_are_trainable_on_demand(strategy: dx.MirroredStrategy) -> None:
    sync = tf.VariableSynchronization.ON_READ
    with strategy.scope():
        assert not tf.Variable(0.0, synchronization=sync).trainable
        assert tf.Variable(0.0, trainable=True, synchronization=sync).trainable


def test_replica_local_variables_have_the_first_replicas_random_value(
    strategy: dx.MirroredStrategy,
) -> None:
    rng = np.random.default_rng()
    made = strategy.run(lambda: _local_variable("mean", lambda: rng.normal()))
    first, second = (float(copy) for copy in made.values)
    assert first == second

"""Document 003 (the tower API), by its own names: every block of code, as it stands."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distribax as dx
from distribax.contrib import distribute
from tests.seeds import shim
from tests.seeds.conftest import Decorator

# TensorFlow 1.9's names, on top of those that the other documents use.
tf: Any = SimpleNamespace(
    **vars(shim.tf),
    contrib=SimpleNamespace(distribute=distribute),
    get_tower_context=distribute.get_tower_context,
    get_variable=distribute.get_variable,
    group=jax.block_until_ready,
)
session: Any = SimpleNamespace(run=lambda op: op())


@pytest.fixture(params=[1, 2, 4])
def distribution(request: pytest.FixtureRequest) -> distribute.DistributionStrategy:
    """The document's strategy, on CPUs."""
    devices = [f"/device:CPU:{index}" for index in range(request.param)]
    return tf.contrib.distribute.MirroredStrategy(devices)


@pytest.fixture
def default() -> Iterator[distribute.DistributionStrategy]:
    """The strategy of code that knows of none."""
    yield distribute.get_distribution_strategy()
    distribute.reset_variable_store()


def _numbers(distribution: Any, value: Any) -> list[Any]:
    return [jnp.asarray(part).tolist() for part in distribution.unwrap(value)]


def test_ordinary_model_code(
    distribution: distribute.DistributionStrategy, execution: Decorator
) -> None:
    my_distribution = distribution
    dataset = tf.data.Dataset.from_tensor_slices([[1.0], [2.0], [3.0], [4.0]])

    def tower_fn(x: Any) -> Any:
        # Any variables created in `tower_fn` are created using `my_distribution`'s policy
        seen = tf.get_variable("seen", initializer=0.0, aggregation="SUM")
        seen.assign_add(jnp.sum(x))
        return x

    with my_distribution.scope():
        iterator = my_distribution.distribute_dataset(dataset).make_one_shot_iterator()
        tower_fn = execution(tower_fn)
        tower_train_ops = my_distribution.call_for_each_tower(tower_fn, iterator.get_next())
        train_op = tf.group(my_distribution.unwrap(tower_train_ops))
        seen = tf.get_variable("seen", reuse=True)
        towers = my_distribution.num_towers
        assert [x.tolist() for x in train_op] == [[index + 1.0] for index in range(towers)]
        assert _numbers(my_distribution, seen) == [sum(range(1, towers + 1))] * towers
    iterator.close()


def test_an_initializable_iterator(distribution: distribute.DistributionStrategy) -> None:
    my_distribution = distribution
    dataset = tf.data.Dataset.range(8)
    with my_distribution.scope():
        iterator = my_distribution.distribute_dataset(dataset).make_initializable_iterator()
        session.run(iterator.initializer)
        first = _numbers(my_distribution, iterator.get_next())
        second = _numbers(my_distribution, iterator.get_next())
        session.run(iterator.initializer)
        assert _numbers(my_distribution, iterator.get_next()) == first
    assert first + second == list(range(2 * my_distribution.num_towers))
    iterator.close()


def test_unwrapping_and_merging(distribution: distribute.DistributionStrategy) -> None:
    x, w = object(), distribute.PerDevice(["w0", "w1", "w2", "w3"][: distribution.num_towers])
    with distribution.scope():
        v = tf.get_variable("v", initializer=1.0)

        def fn(w_i: str) -> Any:
            d_i = tf.get_tower_context().device
            assert d_i == distribution.worker_devices[tf.get_tower_context().tower_id]
            return x, w_i.replace("w", "a"), v

        merged = distribution.call_for_each_tower(fn, w)
        assert merged[0] is x
        assert distribution.unwrap(merged[1]) == ["a0", "a1", "a2", "a3"][: distribution.num_towers]
        assert merged[2] is v


def test_worker_device_index(
    distribution: distribute.DistributionStrategy, execution: Decorator
) -> None:
    distribution_strategy = distribution
    seen: list[Any] = []

    with distribution_strategy.scope():

        def fn(device_id: Any) -> Any:
            # device_id is an integer. `fn` is being executed on device:
            #    distribution_strategy.worker_devices[device_id].
            if isinstance(device_id, int):
                device = distribution_strategy.worker_devices[device_id]
                assert device == tf.get_tower_context().device
            seen.append(device_id)
            return jnp.asarray(device_id)

        @execution
        def step() -> Any:
            return distribution_strategy.call_for_each_tower(
                fn, distribution_strategy.worker_device_index
            )

        ids = _numbers(distribution_strategy, step())
    assert ids == list(range(distribution_strategy.num_towers))
    assert seen


def test_merge_call(distribution: distribute.DistributionStrategy, execution: Decorator) -> None:
    # Called once in "cross-tower" context.
    def merge_fn(distribution: distribute.DistributionStrategy, three_plus_tower_id: Any) -> Any:
        # sum the values across towers
        return sum(distribution.unwrap(three_plus_tower_id))

    # Called once per tower in `distribution`, in a "tower" context.
    def fn(three: Any) -> Any:
        tower_ctx = tf.get_tower_context()
        v = three + tower_ctx.tower_id
        # Computes the sum of the `v` values across all towers.
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with distribution.scope():
        # in "cross-tower" context
        fn = execution(fn)
        merged_results = distribution.call_for_each_tower(fn, 3)
        # merged_results has the values from every tower execution of `fn`.
        values = [3 + index for index in range(distribution.num_towers)]
        assert _numbers(distribution, merged_results) == [sum(values) + value for value in values]


def test_colocate_vars_with(distribution: distribute.DistributionStrategy) -> None:
    distribution_strategy = distribution
    seen: list[Any] = []
    with distribution_strategy.scope():
        var1 = tf.get_variable("var1", initializer=1.0)
        with distribution_strategy.colocate_vars_with(var1):
            # var2 and var3 will be created on the same device(s) as var1
            var2 = tf.get_variable("var2", initializer=2.0)
            var3 = tf.get_variable("var3", initializer=3.0)

        def fn(v1: Any, v2: Any, v3: Any) -> None:
            # operates on v1 from var1, v2 from var2, and v3 from var3
            seen.append((float(v1), float(v2), float(v3)))

        # `fn` runs on every device `v1` is on, `v2` and `v3` will be there too.
        distribution_strategy.update(var1, fn, var2, var3)
    assert var1.devices == var2.devices == var3.devices
    assert seen == [(1.0, 2.0, 3.0)] * distribution.num_towers


def test_distribute_dataset(
    distribution: distribute.DistributionStrategy, execution: Decorator
) -> None:
    distribution_strategy = distribution

    def tower_fn(x: Any) -> Any:
        return x + 1

    def dataset_fn() -> Any:
        return tf.data.Dataset.from_tensors([[1.0]]).repeat()

    with distribution_strategy.scope():
        distributed_dataset = distribution_strategy.distribute_dataset(dataset_fn)
        iterator = distributed_dataset.make_one_shot_iterator()
        tower_fn = execution(tower_fn)
        tower_results = distribution_strategy.call_for_each_tower(tower_fn, iterator.get_next())
        towers = distribution_strategy.num_towers
        assert _numbers(distribution_strategy, tower_results) == [[[2.0]]] * towers
    assert isinstance(distributed_dataset, tf.contrib.distribute.PerDeviceDataset)
    iterator.close()


def test_update_implements_logic_like(distribution: distribute.DistributionStrategy) -> None:
    def fn(v: Any, x: Any, *, scale: float) -> Any:
        return v + x * scale

    with distribution.scope():
        var = tf.get_variable("var", initializer=1.0)
        x = distribution.broadcast(jnp.asarray(2.0), var)

        results = {}
        for v, own in zip(distribution.unwrap(var), distribution.unwrap(x), strict=True):
            results[v.device] = fn(v, own, scale=10.0)

        merged = distribution.update(var, fn, x, scale=10.0)
        assert list(results) == distribution.parameter_devices
        assert distribution.unwrap(merged) == list(results.values())


def test_non_slot_variables(
    distribution: distribute.DistributionStrategy, default: Any, execution: Decorator
) -> None:
    for d in (distribution, default):
        with d.scope():
            v = tf.get_variable("v", initializer=1.0)
            with d.colocate_vars_with(d.non_slot_devices([v])):
                beta_power = tf.get_variable("beta_power", initializer=0.5)

            def finish(d: Any = d, v: Any = v, beta_power: Any = beta_power) -> None:
                d.update_non_slot(
                    d.non_slot_devices([v]), lambda: beta_power.assign(beta_power * 0.5)
                )

            execution(finish)()
            assert set(_numbers(d, beta_power)) == {0.25}


def test_tower_local_variables(
    distribution: distribute.DistributionStrategy, execution: Decorator
) -> None:
    with distribution.scope():
        with distribution.tower_local_var_scope("mean"):
            mean = tf.get_variable("mean", initializer=0.0)

        def fn() -> None:
            # each tower will directly update its local variable instance
            mean.assign_add(jnp.asarray(tf.get_tower_context().tower_id, jnp.float32))

        distribution.call_for_each_tower(execution(fn))
        # only the aggregated value (accessible using `fetch()`) will be exported
        assert float(distribution.fetch(mean)) == (distribution.num_towers - 1) / 2
    assert not mean.trainable


def test_code_without_any_knowledge_of_strategies(default: Any, execution: Decorator) -> None:
    """A layer that is distribution-aware works as before in code that is not."""

    def layer(x: Any) -> Any:
        seen = tf.get_variable("seen", initializer=0.0, reuse=distribute.AUTO_REUSE)

        def merge_fn(distribution: Any, x: Any) -> None:
            total = distribution.reduce("sum", x, seen)
            distribution.update(seen, lambda v, t: v.assign_add(t), total)

        tf.get_tower_context().merge_call(merge_fn, x)
        return x * 2

    assert tf.get_tower_context().is_single_tower
    step = execution(layer)
    assert [float(step(jnp.asarray(x))) for x in (3.0, 4.0)] == [6.0, 8.0]
    assert float(tf.get_variable("seen", reuse=True)) == 7.0


def test_a_layer_that_asks_whether_there_are_several_towers(
    distribution: distribute.DistributionStrategy,
) -> None:
    def layer(x: Any) -> Any:
        if tf.get_tower_context().is_single_tower:
            return x
        merged = tf.get_tower_context().merge_call(lambda d, x: d.reduce("mean", x), x)
        return x - merged

    assert layer(5.0) == 5.0
    with distribution.scope():
        x = distribute.PerDevice([jnp.asarray(float(i)) for i in range(distribution.num_towers)])
        results = _numbers(distribution, distribution.call_for_each_tower(layer, x))
    middle = (distribution.num_towers - 1) / 2
    assert results == [index - middle for index in range(distribution.num_towers)]


def test_run_concurrently_is_not_passed_on(distribution: distribute.DistributionStrategy) -> None:
    def fn(x: int, **kwargs: Any) -> Any:
        return sorted(kwargs)

    with distribution.scope():
        result = distribution.call_for_each_tower(fn, 1, run_concurrently=False, other=2)
        assert distribution.unwrap(result)[0] == ["other"]


def test_the_wrapped_strategy_is_todays(distribution: distribute.DistributionStrategy) -> None:
    assert isinstance(distribution.strategy, dx.MirroredStrategy)
    assert distribution.strategy.num_replicas_in_sync == distribution.num_towers

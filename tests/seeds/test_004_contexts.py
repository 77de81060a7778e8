"""Document 004: contexts, values, variables and strategies, block by block."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.seeds.conftest import Decorator
from tests.seeds.shim import contents, ours, tf


def test_distributed_values_returned_by_run(strategy: dx.MirroredStrategy) -> None:
    @tf.function
    def f() -> object:
        ctx = tf.distribute.get_replica_context()
        return ctx.replica_id_in_sync_group

    assert repr(strategy.run(f)) == ours(
        """PerReplica:{
  0: <tf.Tensor: shape=(), dtype=int32, numpy=0>,
  1: <tf.Tensor: shape=(), dtype=int32, numpy=1>
}"""
    )


def test_distributed_values_hold_one_value_a_replica(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        v = tf.Variable(2.0)
    made = strategy.experimental_distribute_values_from_function(lambda ctx: jnp.ones(()))
    returned = strategy.run(lambda x: x + 1, args=(made,))
    for value in (made, returned, strategy.extended.broadcast_to(jnp.ones(()))):
        assert isinstance(value, dx.DistributedValues)
        assert len(value.values) == strategy.num_replicas_in_sync
    assert len(v.values) == strategy.num_replicas_in_sync


def test_get_replica_context(strategy: dx.MirroredStrategy) -> None:
    default = tf.distribute.get_replica_context()
    assert isinstance(default, dx.ReplicaContext)
    assert default.strategy is tf.distribute.get_strategy()
    with strategy.scope():
        assert tf.distribute.get_replica_context() is None

    def f() -> dx.ReplicaContext:
        return tf.distribute.get_replica_context()

    found = strategy.run(f)
    assert isinstance(found, dx.PerReplica)
    first, second = found.values
    assert first is not second
    assert first.strategy is second.strategy is strategy
    assert repr(found).startswith("PerReplica:{\n  0: <distribax.ReplicaContext")


def test_get_strategy(strategy: dx.MirroredStrategy) -> None:
    default = tf.distribute.get_strategy()
    assert "DefaultStrategy" in str(default)
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        assert "MirroredStrategy" in str(tf.distribute.get_strategy())
    assert tf.distribute.get_strategy() is default


def test_has_strategy(strategy: dx.MirroredStrategy) -> None:
    assert tf.distribute.has_strategy() is False
    with strategy.scope():
        assert tf.distribute.has_strategy() is True
    assert tf.distribute.has_strategy() is False


def test_in_cross_replica_context(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    assert tf.distribute.in_cross_replica_context() is False
    with strategy.scope():
        assert tf.distribute.in_cross_replica_context() is True

    @execution
    def f() -> bool:
        return tf.distribute.in_cross_replica_context()

    assert strategy.run(f) is False


def test_mirrored_strategy_arguments() -> None:
    arguments = inspect.signature(dx.MirroredStrategy).parameters
    assert [(name, p.default) for name, p in arguments.items()] == [
        ("devices", None),
        ("cross_device_ops", None),
    ]


@pytest.mark.parametrize("devices", [None, []])
def test_mirrored_strategy_takes_all_devices_when_none_are_named(devices: list[str] | None) -> None:
    strategy = tf.distribute.MirroredStrategy(devices)
    names = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(8)]
    assert list(strategy.extended.worker_devices) == names


def test_mirrored_strategy_default_cross_device_ops(strategy: dx.MirroredStrategy) -> None:
    assert isinstance(strategy.extended.cross_device_ops, dx.NcclAllReduce)


def test_mirrored_strategy_variable(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        x = tf.Variable(1.0)
    assert repr(x) == ours(
        """MirroredVariable:{
  0: <tf.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,
  1: <tf.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>
}"""
    )


def test_mirrored_variables_stay_in_sync(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    @execution
    def step() -> None:
        ctx = tf.distribute.get_replica_context()
        v.assign_add(1.0 + jnp.asarray(ctx.replica_id_in_sync_group, jnp.float32))

    strategy.run(step)
    assert [float(copy) for copy in v.values] == [4.0, 4.0]


def test_one_device_strategy() -> None:
    assert list(inspect.signature(dx.OneDeviceStrategy).parameters) == ["device"]
    strategy = tf.distribute.OneDeviceStrategy(device="/gpu:0")
    with strategy.scope():
        v = tf.Variable(1.0)
        assert v.device == ours("/job:localhost/replica:0/task:0/device:GPU:0")

    def step_fn(x: int) -> int:
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))
    assert result == 90


def test_one_device_strategy_places_variables_and_steps(execution: Decorator) -> None:
    strategy = tf.distribute.OneDeviceStrategy(device="/gpu:3")
    with strategy.scope():
        v = tf.Variable(1.0)

    @execution
    def step() -> object:
        return jnp.ones(2) + v

    result = strategy.run(step)
    assert [str(device) for device in result.devices()] == ["cpu:3"]
    assert v.device.endswith("device:CPU:3")


def test_replica_context(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    @execution
    def f() -> object:
        replica_context = tf.distribute.get_replica_context()
        assert replica_context.num_replicas_in_sync == 2
        assert replica_context.strategy is strategy
        return replica_context.replica_id_in_sync_group

    assert contents(strategy.run(f)) == [0, 1]


def test_replica_context_all_reduce(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    @execution
    def f() -> object:
        ctx = tf.distribute.get_replica_context()
        x = jnp.asarray([1.0, 2.0]) * (ctx.replica_id_in_sync_group + 1)
        summed = ctx.all_reduce(tf.distribute.ReduceOp.SUM, x)
        return summed, ctx.all_reduce("MEAN", {"x": x})["x"]

    summed, mean = strategy.run(f)
    assert contents(summed) == [[3.0, 6.0]] * 2
    assert contents(mean) == [[1.5, 3.0]] * 2


def test_replica_context_all_gather(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    @execution
    def f() -> object:
        ctx = tf.distribute.get_replica_context()
        x = jnp.asarray([[1, 2]]) + 2 * ctx.replica_id_in_sync_group
        return ctx.all_gather(x, axis=0), ctx.all_gather(x, axis=1)

    rows, columns = strategy.run(f)
    assert contents(rows) == [[[1, 2], [3, 4]]] * 2
    assert contents(columns) == [[[1, 2, 3, 4]]] * 2


def test_replica_context_merge_call(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    def merge_fn(merging: dx.Strategy, x: object) -> object:
        assert merging is strategy
        assert tf.distribute.in_cross_replica_context()
        return merging.reduce("SUM", x, axis=None)

    @execution
    def f() -> object:
        ctx = tf.distribute.get_replica_context()
        x = jnp.asarray(ctx.replica_id_in_sync_group) + 1
        return x * ctx.merge_call(merge_fn, args=(x,))

    assert contents(strategy.run(f)) == [3, 6]


def test_reduce_op() -> None:
    assert [op.name for op in dx.ReduceOp] == ["SUM", "MEAN"]


def test_cross_device_ops_are_chosen_by_the_strategy() -> None:
    for ops in (dx.ReductionToOneDevice(), dx.NcclAllReduce(), dx.HierarchicalCopyAllReduce()):
        assert isinstance(ops, dx.CrossDeviceOps)
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"], cross_device_ops=ops)
        assert strategy.extended.cross_device_ops is ops
        values = strategy.experimental_distribute_values_from_function(
            lambda ctx: jnp.asarray([1.0, 2.0]) * (ctx.replica_id_in_sync_group + 1)
        )
        assert strategy.reduce("SUM", values, axis=None).tolist() == [3.0, 6.0]


def test_reduction_to_one_device_arguments() -> None:
    arguments = inspect.signature(dx.ReductionToOneDevice).parameters
    assert list(arguments) == ["reduce_to_device", "accumulation_fn"]
    ops = dx.ReductionToOneDevice(reduce_to_device="CPU:1", accumulation_fn=jnp.maximum)
    strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"], cross_device_ops=ops)
    values = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray([[5.0, 1.0], [2.0, 3.0]])[ctx.replica_id_in_sync_group]
    )
    # The accumulation is the one that was asked for, and the result goes to every replica.
    reduced = strategy.extended.reduce_to("SUM", values, destinations=["CPU:0", "CPU:1"])
    assert contents(reduced) == [[5.0, 3.0]] * 2


def test_central_storage_strategy(execution: Decorator) -> None:
    strategy = tf.distribute.CentralStorageStrategy(["GPU:0", "GPU:1"], parameter_device="CPU:2")
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    assert v.device.endswith("device:CPU:2")
    assert len(v.devices) == 1

    @execution
    def step(x: object) -> None:
        v.assign_add(v * x)

    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(2.0) + ctx.replica_id_in_sync_group
    )
    strategy.run(step, args=(x,))
    assert float(v) == 6.0


def test_gather(strategy: dx.MirroredStrategy) -> None:
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: tf.identity(tf.constant([[1], [2]]))
    )
    gathered = ours(
        """<tf.Tensor: shape=(4, 1), dtype=int32, numpy=
array([[1],
       [2],
       [1],
       [2]], dtype=int32)>"""
    )
    assert repr(strategy.gather(distributed_values, axis=0)) == gathered

    with strategy.scope():
        distributed_values = tf.Variable([[1], [2]])

    assert repr(strategy.gather(distributed_values, axis=0)) == gathered


def test_gather_of_uneven_pieces(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    @execution
    def gather(value: object) -> object:
        return strategy.gather(value, axis=0)

    even = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray([1, 2]) + 2 * ctx.replica_id_in_sync_group
    )
    assert np.asarray(gather(even)).tolist() == [1, 2, 3, 4]
    uneven = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.arange(3 - ctx.replica_id_in_sync_group)
    )
    assert np.asarray(gather(uneven)).tolist() == [0, 1, 2, 0, 1]


def test_num_replicas_in_sync(strategy: dx.MirroredStrategy) -> None:
    assert strategy.num_replicas_in_sync == 2
    assert tf.distribute.OneDeviceStrategy("GPU:0").num_replicas_in_sync == 1


def test_run_arguments(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    arguments = inspect.signature(strategy.run).parameters
    assert [(name, p.default) for name, p in arguments.items()] == [
        ("fn", inspect.Parameter.empty),
        ("args", ()),
        ("kwargs", None),
        ("options", None),
    ]

    @execution
    def fn(x: object, *, y: object) -> object:
        return x - y  # type: ignore[operator]

    y = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(float(ctx.replica_id_in_sync_group))
    )
    result = strategy.run(fn, args=(3.0,), kwargs={"y": y}, options=dx.RunOptions())
    assert contents(result) == [3.0, 2.0]


def test_scope(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        mirrored_variable = tf.Variable(1.0)
    assert repr(mirrored_variable).startswith("MirroredVariable:{")
    assert mirrored_variable.distribute_strategy is strategy

    regular_variable = tf.Variable(1.0)
    assert repr(regular_variable) == ours(
        "<tf.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"
    )
    assert regular_variable.distribute_strategy is tf.distribute.get_strategy()


def test_experimental_distribute_values_from_function(strategy: dx.MirroredStrategy) -> None:
    seen: list[dx.ValueContext] = []

    def value_fn(ctx: dx.ValueContext) -> np.ndarray:
        seen.append(ctx)
        return np.full(2, ctx.replica_id_in_sync_group)

    values = strategy.experimental_distribute_values_from_function(value_fn)
    assert contents(values) == [[0, 0], [1, 1]]
    assert [ctx.num_replicas_in_sync for ctx in seen] == [2, 2]

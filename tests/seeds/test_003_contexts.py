"""Document 003 (the tower API), by today's names: contexts, wrapping, merging, merge_call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distribax as dx
from tests.seeds.conftest import Decorator
from tests.seeds.shim import contents, tf


def _replica_ids(strategy: dx.Strategy) -> Any:
    """What `worker_device_index` is: the index of each replica's device."""
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(ctx.replica_id_in_sync_group)
    )


# Code without any knowledge of strategies.


def test_by_default_code_is_in_a_single_replica_context() -> None:
    ctx = tf.distribute.get_replica_context()
    assert ctx.num_replicas_in_sync == 1
    assert ctx.replica_id_in_sync_group == 0
    assert not tf.distribute.in_cross_replica_context()


def test_ordinary_code_works_with_distribution_aware_layers(execution: Decorator) -> None:
    class Layer:
        def __init__(self) -> None:
            self.seen = tf.Variable(0.0)

        def __call__(self, x: Any) -> Any:
            ctx = tf.distribute.get_replica_context()

            def merge_fn(strategy: dx.Strategy, x: Any) -> None:
                total = strategy.extended.reduce_to("SUM", x, self.seen)
                strategy.extended.update(self.seen, lambda v, t: v.assign_add(t), args=(total,))

            ctx.merge_call(merge_fn, args=(x,))
            return x * 2

    layer = Layer()
    assert float(execution(layer.__call__)(jnp.asarray(3.0))) == 6.0
    assert float(layer.seen) == 3.0


def test_a_layer_updates_state_across_replicas(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    with strategy.scope():
        seen = tf.Variable(0.0)

    def merge_fn(strategy: dx.Strategy, x: Any) -> None:
        total = strategy.extended.reduce_to("SUM", x, seen)
        strategy.extended.update(seen, lambda v, t: v.assign_add(t), args=(total,))

    @execution
    def layer(x: Any) -> Any:
        tf.distribute.get_replica_context().merge_call(merge_fn, args=(x,))
        return x * 2

    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(3.0) + ctx.replica_id_in_sync_group
    )
    assert contents(strategy.run(layer, args=(x,))) == [6.0, 8.0]
    assert [float(copy) for copy in seen.values] == [7.0, 7.0]


# Unwrapping and merging.


def test_call_for_each_replica_unwraps_its_arguments(strategy: dx.MirroredStrategy) -> None:
    seen: list[tuple[int, float, float]] = []

    def fn(t: Any, m: Any) -> None:
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        seen.append((replica_id, float(t), float(m)))

    t = dx.PerReplica([jnp.asarray(1.0), jnp.asarray(2.0)])
    m = strategy.extended.broadcast_to(jnp.asarray(5.0))
    assert isinstance(m, dx.Mirrored)
    with strategy.scope():
        strategy.extended.call_for_each_replica(fn, args=(t, m))
    assert seen == [(0, 1.0, 5.0), (1, 2.0, 5.0)]


def test_merging_same_object_different_values_and_variable_members(
    strategy: dx.MirroredStrategy,
) -> None:
    x = object()
    with strategy.scope():
        v = tf.Variable(1.0)

    def fn() -> Any:
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        return (x, ["a", "b"][replica_id], v)

    merged = strategy.extended.call_for_each_replica(fn)
    assert merged[0] is x
    assert isinstance(merged[1], dx.PerReplica)
    assert merged[1].values == ("a", "b")
    assert merged[2] is v


def test_merging_in_a_compiled_run(strategy: dx.MirroredStrategy) -> None:
    marker = object()
    with strategy.scope():
        v = tf.Variable(1.0)

    @tf.function
    def fn(ids: Any) -> Any:
        ctx = tf.distribute.get_replica_context()
        return marker, ids + 1, v, ctx.all_reduce("SUM", ids)

    same, different, variable, mirrored = strategy.run(fn, args=(_replica_ids(strategy),))
    assert same is marker
    assert isinstance(different, dx.PerReplica)
    assert contents(different) == [1, 2]
    assert variable is v
    assert isinstance(mirrored, dx.Mirrored)
    assert int(mirrored) == 1


def test_a_shared_argument_comes_back_as_itself(strategy: dx.MirroredStrategy) -> None:
    shared = jnp.arange(3.0)

    def fn(x: Any) -> Any:
        return x

    assert strategy.run(fn, args=(shared,)) is shared
    # A compiled program returns a new array, but one value for all replicas it stays.
    compiled = strategy.run(tf.function(fn), args=(shared,))
    assert isinstance(compiled, jax.Array)
    assert compiled.tolist() == shared.tolist()
    assert strategy.experimental_local_results(compiled) == (compiled,)
    with pytest.raises(ValueError, match="one value that all 2 replicas share"):
        strategy.reduce("SUM", shared, axis=None)
    assert strategy.reduce("MEAN", shared, axis=None) is shared


def test_merging_keeps_the_structure_and_refuses_different_ones(
    strategy: dx.MirroredStrategy,
) -> None:
    ids = _replica_ids(strategy)
    merged = strategy.run(lambda i: {"a": (i, None), "b": [i * 2]}, args=(ids,))
    assert contents(merged["a"][0]) == [0, 1]
    assert merged["a"][1] is None
    assert contents(merged["b"][0]) == [0, 2]
    with pytest.raises(ValueError, match="different structure"):
        strategy.run(lambda i: [i] * (1 + int(i)), args=(ids,))


# Replica context and cross-replica context.


def test_scope_leads_from_the_default_context_to_the_cross_replica_context(
    strategy: dx.MirroredStrategy,
) -> None:
    assert tf.distribute.get_replica_context() is not None
    with strategy.scope():
        assert tf.distribute.get_replica_context() is None
        assert tf.distribute.in_cross_replica_context()
    assert tf.distribute.get_replica_context() is not None


def test_contexts_switch_back_and_forth(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    trail: list[str] = []

    def note() -> None:
        trail.append("cross" if tf.distribute.in_cross_replica_context() else "replica")

    def merge_fn(strategy: dx.Strategy) -> None:
        note()

    def fn() -> None:
        note()
        tf.distribute.get_replica_context().merge_call(merge_fn)
        note()

    @execution
    def step() -> None:
        strategy.run(fn)

    with strategy.scope():
        note()
        step()
        note()
    # Replicas that run one after the other note their own; the merge is once for all.
    assert trail[0] == trail[-1] == "cross"
    inner = trail[1:-1]
    assert inner.count("cross") == 1
    middle = inner.index("cross")
    assert set(inner[:middle]) == set(inner[middle + 1 :]) == {"replica"}


def test_call_for_each_replica_needs_the_cross_replica_context(
    strategy: dx.MirroredStrategy,
) -> None:
    def fn() -> None:
        strategy.extended.call_for_each_replica(lambda: None)

    with pytest.raises(RuntimeError, match="needs the cross-replica context"):
        strategy.run(fn)


def test_scope_is_refused_inside_a_replica(strategy: dx.MirroredStrategy) -> None:
    def fn() -> None:
        with strategy.scope():
            pass

    with pytest.raises(RuntimeError, match="running a replica here"):
        strategy.run(fn)


def test_a_replica_context_is_not_used_outside_its_replica(strategy: dx.MirroredStrategy) -> None:
    kept = strategy.run(lambda: tf.distribute.get_replica_context()).values[1]
    with pytest.raises(RuntimeError, match="not the current one"):
        kept.merge_call(lambda strategy: None)


# worker_device_index.


def test_worker_device_index(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():

        def fn(device_id: Any) -> Any:
            (device,) = tf.distribute.get_replica_context().devices
            assert device == strategy.extended.worker_devices[int(device_id)]
            return device_id

        assert contents(strategy.run(fn, args=(_replica_ids(strategy),))) == [0, 1]


# merge_call.


def test_merge_call(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    distribution = strategy

    # Called once in "cross-replica" context.
    def merge_fn(distribution: dx.Strategy, three_plus_replica_id: Any) -> Any:
        # sum the values across replicas
        return sum(distribution.unwrap(three_plus_replica_id))

    # Called once per replica in `distribution`, in a "replica" context.
    def fn(three: Any) -> Any:
        replica_ctx = tf.distribute.get_replica_context()
        v = three + replica_ctx.replica_id
        # Computes the sum of the `v` values across all replicas.
        s = replica_ctx.merge_call(merge_fn, args=(v,))
        return s + v

    with distribution.scope():
        # in "cross-replica" context
        merged_results = execution(lambda: distribution.run(fn, args=(3,)))()
        # merged_results has the values from every replica execution of `fn`.
        assert list(map(int, distribution.unwrap(merged_results))) == [7 + 3, 7 + 4]


def test_merge_call_pauses_all_replicas_and_resumes_them(strategy: dx.MirroredStrategy) -> None:
    trail: list[str] = []

    def merge_fn(strategy: dx.Strategy, name: Any) -> Any:
        trail.append("merge " + " ".join(name.values))
        return dx.PerReplica([f"{part}!" for part in name.values])

    def fn(replica_id: Any) -> str:
        name = f"r{int(replica_id)}"
        trail.append(f"{name} starts")
        answer = tf.distribute.get_replica_context().merge_call(merge_fn, args=(name,))
        trail.append(f"{name} resumes with {answer}")
        return tf.distribute.get_replica_context().merge_call(merge_fn, args=(answer,))

    result = strategy.run(fn, args=(_replica_ids(strategy),))
    assert result.values == ("r0!!", "r1!!")
    assert trail == [
        "r0 starts",
        "r1 starts",
        "merge r0 r1",
        "r0 resumes with r0!",
        "r1 resumes with r1!",
        "merge r0! r1!",
    ]


def test_replicas_must_agree_on_their_merge_calls(strategy: dx.MirroredStrategy) -> None:
    def fn(replica_id: Any) -> None:
        if int(replica_id) == 0:
            tf.distribute.get_replica_context().merge_call(lambda strategy: None)

    with pytest.raises(RuntimeError, match=r"replicas \[0\] wait .* for replicas \[1\]"):
        strategy.run(fn, args=(_replica_ids(strategy),))
    # The strategy is usable afterwards.
    assert strategy.run(lambda: 1) == 1


def test_an_error_in_a_replica_keeps_its_type(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    class Mine(Exception):
        pass

    @execution
    def fn() -> None:
        raise Mine("from a replica")

    with pytest.raises(Mine, match="from a replica"):
        strategy.run(fn)
    assert strategy.run(lambda: 1) == 1


# unwrap and group.


def test_unwrap_returns_a_list(strategy: dx.MirroredStrategy) -> None:
    assert list(map(int, strategy.unwrap(_replica_ids(strategy)))) == [0, 1]
    assert strategy.unwrap(7) == [7]
    with strategy.scope():
        v = tf.Variable(2.0)
    assert [float(copy) for copy in strategy.unwrap(v)] == [2.0, 2.0]


def test_group_waits_for_what_a_run_has_started(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    with strategy.scope():
        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @execution
    def replica_train_op(x: Any) -> Any:
        v.assign_add(x)
        return x

    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(()))
    with strategy.scope():
        assert strategy.group(strategy.run(replica_train_op, args=(x,))) is None
    assert float(v) == 2.0


def test_ordinary_model_code_under_a_strategy(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    my_distribution = strategy
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(4)
    made: list[Any] = []

    def replica_fn(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM))
        made[0].assign_add(jnp.sum(x))
        return x

    with my_distribution.scope():
        iterator = my_distribution.experimental_distribute_dataset(dataset).make_one_shot_iterator()
        step = execution(lambda x: my_distribution.run(replica_fn, args=(x,)))
        replica_train_ops = step(iterator.get_next())
        my_distribution.group(my_distribution.unwrap(replica_train_ops))
    iterator.close()
    assert float(made[0]) == 10.0
    assert len(made[0].devices) == 2


def test_an_initializable_iterator_is_ready_to_use(strategy: dx.MirroredStrategy) -> None:
    dataset = tf.data.Dataset.range(4).batch(4)
    iterator = strategy.experimental_distribute_dataset(dataset).make_initializable_iterator()
    iterator.initialize()
    assert iterator.initializer is None
    assert contents(iterator.get_next()) == [[0, 1], [2, 3]]
    iterator.close()

"""Document 002: the class Strategy, its custom training loop and its methods."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.seeds.conftest import Decorator
from tests.seeds.shim import contents, tf

EPOCHS = 2


def _per_replica(strategy: dx.Strategy, *pieces: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(pieces[ctx.replica_id_in_sync_group])
    )


# The custom training loop.


def test_custom_training_loop(strategy: dx.MirroredStrategy) -> None:
    my_strategy = strategy
    dataset = tf.data.Dataset.range(8).batch(4)
    traced: list[int] = []
    results = []

    with my_strategy.scope():

        @tf.function
        def distribute_train_epoch(dataset: Any) -> Any:
            def replica_fn(input: Any) -> Any:
                traced.append(1)
                result = jnp.sum(input)
                return result

            total_result = 0
            for x in dataset:
                per_replica_result = my_strategy.experimental_run_v2(replica_fn, args=(x,))
                total_result += my_strategy.reduce(
                    tf.distribute.ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
        for _ in range(EPOCHS):
            train_result = distribute_train_epoch(dist_dataset)
            results.append(int(train_result))

    assert results == [28, 28]
    # Steps are compiled once, the data set is never unrolled.
    assert len(traced) < 4


def test_custom_training_loop_with_a_last_partial_batch(strategy: dx.MirroredStrategy) -> None:
    @tf.function
    def distribute_train_epoch(dataset: Any) -> Any:
        total_result = 0
        for x in dataset:
            per_replica_result = strategy.run(jnp.sum, args=(x,))
            total_result += strategy.reduce(
                tf.distribute.ReduceOp.SUM, per_replica_result, axis=None
            )
        return total_result

    dist_dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(11).batch(4))
    assert int(distribute_train_epoch(dist_dataset)) == sum(range(11))


def test_variables_of_replica_fn_are_created_by_the_strategys_policy(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    created: list[Any] = []

    def replica_fn(x: Any) -> Any:
        if not created:
            created.append(tf.Variable(lambda: np.random.default_rng().normal()))
        return created[0] * x

    @execution
    def step() -> Any:
        return strategy.run(replica_fn, args=(jnp.ones(()),))

    first, second = contents(step())
    (variable,) = created
    assert len(variable.devices) == 2
    assert variable.distribute_strategy is strategy
    assert first == second == float(variable)


def test_library_functions_use_get_replica_context(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    def global_norm(x: Any) -> Any:
        ctx = tf.distribute.get_replica_context()
        return jnp.sqrt(ctx.all_reduce(tf.distribute.ReduceOp.SUM, jnp.sum(x * x)))

    @execution
    def replica_fn(x: Any) -> Any:
        return global_norm(x)

    result = strategy.run(replica_fn, args=(_per_replica(strategy, [3.0, 0.0], [0.0, 4.0]),))
    assert contents(result) == [5.0, 5.0]


def test_metrics_accumulate_across_steps(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    with strategy.scope():
        loss = tf.keras.metrics.Mean()
        accuracy = tf.keras.metrics.Accuracy()

    @execution
    def step(x: Any) -> None:
        loss.update_state(x)
        accuracy.update_state(x, jnp.asarray([1.0, 2.0]))

    for start in (0.0, 2.0):
        pieces = [start, start + 1], [start + 2, start + 3]
        strategy.run(step, args=(_per_replica(strategy, *pieces),))
    assert float(loss.result()) == np.mean([0, 1, 2, 3, 2, 3, 4, 5])
    assert float(accuracy.result()) == 0.0
    loss.reset_state()
    assert float(loss.result()) == 0.0


# The class.


def test_init_takes_the_extended() -> None:
    assert list(inspect.signature(dx.Strategy).parameters) == ["extended"]
    strategy = tf.distribute.OneDeviceStrategy("GPU:0")
    copy = dx.Strategy(type(strategy.extended)(strategy.extended.local_devices[0]))
    assert copy.run(lambda: dx.get_strategy()) is copy
    with pytest.raises(TypeError, match="extended='GPU:0' is not a StrategyExtended"):
        dx.Strategy("GPU:0")  # type: ignore[arg-type]


def test_extended_is_a_strategy_extended(strategy: dx.MirroredStrategy) -> None:
    assert isinstance(strategy.extended, dx.StrategyExtended)
    assert strategy.extended.num_replicas_in_sync == strategy.num_replicas_in_sync == 2


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("experimental_distribute_dataset", ["dataset"]),
        ("experimental_distribute_datasets_from_function", ["dataset_fn"]),
        ("experimental_local_results", ["value"]),
        ("experimental_make_numpy_dataset", ["numpy_input"]),
        ("experimental_run_v2", ["fn", "args", "kwargs"]),
        ("reduce", ["reduce_op", "value", "axis"]),
        ("scope", []),
    ],
)
def test_methods_take_the_documents_arguments(method: str, arguments: list[str]) -> None:
    parameters = list(inspect.signature(getattr(dx.Strategy, method)).parameters.values())
    assert [p.name for p in parameters[1 : 1 + len(arguments)]] == arguments
    # What came later can be left out.
    assert all(p.default is not p.empty for p in parameters[1 + len(arguments) :])


# experimental_local_results.


def test_local_results_of_run(strategy: dx.MirroredStrategy, execution: Decorator) -> None:
    @execution
    def fn() -> Any:
        return jnp.asarray(tf.distribute.get_replica_context().replica_id_in_sync_group) * 2

    results = strategy.experimental_local_results(strategy.run(fn))
    assert isinstance(results, tuple)
    assert list(map(int, results)) == [0, 2]


def test_local_results_of_a_variable(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        v = tf.Variable(3.0)
    results = strategy.experimental_local_results(v)
    assert [float(copy) for copy in results] == [3.0, 3.0]
    assert [copy.device[-5:] for copy in results] == ["CPU:0", "CPU:1"]


def test_local_results_of_a_single_value(strategy: dx.MirroredStrategy) -> None:
    value = jnp.ones(2)
    results = strategy.experimental_local_results(value)
    assert results == (value,)
    assert results[0] is value


def test_local_results_of_a_nest_are_one_nest_a_replica(strategy: dx.MirroredStrategy) -> None:
    nest = {"x": _per_replica(strategy, 1, 2), "y": 3}
    first, second = strategy.experimental_local_results(nest)
    assert (int(first["x"]), first["y"]) == (1, 3)
    assert (int(second["x"]), second["y"]) == (2, 3)


# experimental_run_v2.


def test_run_arguments_are_the_replicas_components(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    @execution
    def fn(nest: Any, shared: Any, *, scale: Any) -> Any:
        return {"sum": nest["a"] + nest["b"][0] + shared, "scaled": nest["a"] * scale}

    nest = {"a": _per_replica(strategy, 1.0, 2.0), "b": (jnp.asarray(10.0),)}
    scale = _per_replica(strategy, 3.0, 4.0)
    result = strategy.experimental_run_v2(fn, args=(nest, 100.0), kwargs={"scale": scale})
    assert result.keys() == {"sum", "scaled"}
    assert contents(result["sum"]) == [111.0, 112.0]
    assert contents(result["scaled"]) == [3.0, 8.0]


def test_run_on_a_single_replica_returns_tensors(execution: Decorator) -> None:
    strategy = tf.distribute.MirroredStrategy(["GPU:0"])

    @execution
    def fn(x: Any) -> Any:
        return x + 1

    result = strategy.experimental_run_v2(fn, args=(jnp.asarray(1.0),))
    assert float(result) == 2.0


def test_run_calls_fn_once_for_each_replica_eagerly(strategy: dx.MirroredStrategy) -> None:
    ids: list[int] = []
    strategy.run(lambda: ids.append(tf.distribute.get_replica_context().replica_id_in_sync_group))
    assert ids == [0, 1]


# reduce.


def test_reduce_without_axis_only_goes_across_replicas(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    per_example = _per_replica(strategy, [0, 1, 2, 3], [4, 5, 6, 7])

    @execution
    def reduce(value: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    assert reduce(per_example).tolist() == [0 + 4, 1 + 5, 2 + 6, 3 + 7]


def test_reduce_with_axis_goes_across_the_global_batch(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    per_example = _per_replica(strategy, [0, 1, 2, 3], [4, 5, 6, 7])

    @execution
    def reduce(value: Any) -> Any:
        return (
            strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=0),
            strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=0),
        )

    total, mean = reduce(per_example)
    assert total.shape == ()
    assert int(total) == 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7
    assert float(mean) == 3.5


def test_reduce_of_a_partial_batch_needs_an_axis(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    per_example = _per_replica(strategy, [0.0, 1.0, 2.0, 3.0], [4.0, 5.0])

    def reduce(value: Any, axis: int | None) -> Any:
        step = execution(lambda x: strategy.reduce(tf.distribute.ReduceOp.MEAN, x, axis=axis))
        return step(value)

    with pytest.raises(ValueError, match=r"different shapes, \[\(4,\), \(2,\)\].*axis=0"):
        reduce(per_example, None)
    # The denominator is 6, not 8.
    assert float(reduce(per_example, 0)) == (0 + 1 + 2 + 3 + 4 + 5) / 6


def test_reduce_of_means_weighs_examples_of_a_partial_batch_unevenly(
    strategy: dx.MirroredStrategy,
) -> None:
    per_example = _per_replica(strategy, [0.0, 1.0, 2.0, 3.0], [4.0, 5.0])
    means = strategy.run(jnp.mean, args=(per_example,))
    weighted = strategy.reduce(tf.distribute.ReduceOp.MEAN, means, axis=None)
    assert float(weighted) == (0 + 1 + 2 + 3) / 8 + (4 + 5) / 4


def test_reduce_along_another_axis(strategy: dx.MirroredStrategy) -> None:
    value = _per_replica(strategy, [[1, 2], [3, 4]], [[5, 6], [7, 8]])
    assert strategy.reduce("SUM", value, axis=1).tolist() == [1 + 2 + 5 + 6, 3 + 4 + 7 + 8]


def test_reduce_returns_a_tensor_for_each_leaf(strategy: dx.MirroredStrategy) -> None:
    nest = {"a": _per_replica(strategy, 1.0, 2.0), "b": [_per_replica(strategy, [3.0], [5.0])]}
    reduced = strategy.reduce(tf.distribute.ReduceOp.MEAN, nest, axis=None)
    assert float(reduced["a"]) == 1.5
    assert reduced["b"][0].tolist() == [4.0]


def test_reduce_is_refused_inside_a_replica(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    @execution
    def replica_fn(x: Any) -> Any:
        return strategy.reduce("SUM", x, axis=None)

    with pytest.raises(RuntimeError, match="inside a replica of MirroredStrategy"):
        strategy.run(replica_fn, args=(jnp.ones(()),))


# scope.


def test_scope_sets_the_variable_creator_and_the_context(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        v = tf.Variable(1.0)
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_strategy() is strategy
    assert strategy.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(tf.Variable(1.0))


def test_scope_belongs_to_its_thread(strategy: dx.MirroredStrategy) -> None:
    seen: list[bool] = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(tf.distribute.has_strategy()))
        thread.start()
        thread.join(300)
        assert tf.distribute.has_strategy()
    assert seen == [False]


def test_scope_nests_for_the_same_strategy_only(strategy: dx.MirroredStrategy) -> None:
    other = tf.distribute.OneDeviceStrategy("GPU:0")
    with strategy.scope(), strategy.scope():
        with pytest.raises(RuntimeError, match="inside the scope of another strategy"):
            other.scope().__enter__()
        assert tf.distribute.get_strategy() is strategy
    assert not tf.distribute.has_strategy()


def test_methods_of_another_strategy_are_refused_inside_a_scope(
    strategy: dx.MirroredStrategy,
) -> None:
    other = tf.distribute.OneDeviceStrategy("GPU:0")
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="inside the scope of MirroredStrategy"),
    ):
        other.reduce("SUM", 1.0, axis=None)


def test_values_belong_to_the_strategy_that_made_them(strategy: dx.MirroredStrategy) -> None:
    three = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2"])
    value = _per_replica(strategy, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"replica 2 has no part of a value .* for 2 replica"):
        three.run(lambda x: x, args=(value,))

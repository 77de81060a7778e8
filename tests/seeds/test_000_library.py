"""Documents 000 and 001: the library's names, its intent, and the rules of its glossary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import distribax as dx
from tests.seeds.conftest import Decorator
from tests.seeds.shim import contents, tf

CLASSES = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
]
FUNCTIONS = [
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


@pytest.mark.parametrize("name", CLASSES)
def test_class_exists(name: str) -> None:
    assert isinstance(getattr(dx, name), type)
    assert getattr(dx, name).__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_exists(name: str) -> None:
    assert callable(getattr(dx, name))
    assert getattr(dx, name).__doc__


def test_experimental_module() -> None:
    assert dx.experimental.CentralStorageStrategy is dx.CentralStorageStrategy


# The intent: an algorithm is written once.

STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": dx.get_strategy,
    "one device": lambda: tf.distribute.OneDeviceStrategy("GPU:1"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]),
    "central storage": lambda: tf.distribute.CentralStorageStrategy(["GPU:0", "GPU:1"]),
}


@pytest.fixture(params=STRATEGIES)
def any_strategy(request: pytest.FixtureRequest) -> dx.Strategy:
    return STRATEGIES[request.param]()


def _train(strategy: dx.Strategy, execution: Decorator) -> tuple[list[float], list[float]]:
    """Fits a line to 8 examples: the algorithm knows nothing of the strategy."""
    xs = jnp.arange(8.0).reshape(8, 1) / 8
    ys = 3 * xs + 1
    with strategy.scope():
        w, b = tf.Variable([[0.0]]), tf.Variable([0.0])
        optimizer = dx.Optimizer(optax.sgd(0.1, momentum=0.9))

    def loss_fn(x: Any, y: Any) -> Any:
        return dx.compute_average_loss(jnp.square(x @ w + b - y)[:, 0], global_batch_size=8)

    def replica_step(x: Any, y: Any) -> Any:
        loss, grads = dx.value_and_grad(loss_fn, [w, b])(x, y)
        optimizer.apply_gradients(zip(grads, [w, b], strict=True))
        return loss

    @execution
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    losses = [
        float(step(x, y))
        for _ in range(3)
        for x, y in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((xs, ys)).batch(8)
        )
    ]
    return losses, [float(w.numpy()[0, 0]), float(b.numpy()[0])]


def test_one_algorithm_for_every_strategy(any_strategy: dx.Strategy, execution: Decorator) -> None:
    losses, weights = _train(any_strategy, execution)
    expected_losses, expected_weights = _train(dx.get_strategy(), lambda fn: fn)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert losses[-1] < losses[0]
    assert weights == pytest.approx(expected_weights, rel=1e-5)


def test_library_classes_hide_the_distribution(any_strategy: dx.Strategy) -> None:
    class MeanOverTheGlobalBatch:
        """A layer that is written for replicas and works without any."""

        def __call__(self, x: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce("MEAN", jnp.mean(x))

    def model(x: Any) -> Any:
        return x - MeanOverTheGlobalBatch()(x)

    x = any_strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.arange(4.0).reshape(ctx.num_replicas_in_sync, -1)[
            ctx.replica_id_in_sync_group
        ]
    )
    centred = any_strategy.experimental_local_results(any_strategy.run(model, args=(x,)))
    assert [value for piece in centred for value in piece.tolist()] == [-1.5, -0.5, 0.5, 1.5]


# The glossary.


def test_mirrored_worker_devices_are_the_parameter_devices(strategy: dx.MirroredStrategy) -> None:
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices


@pytest.mark.parametrize("parameter_device", ["GPU:1", "CPU:2"])
def test_central_storage_puts_variables_on_a_single_device(parameter_device: str) -> None:
    strategy = tf.distribute.CentralStorageStrategy(["GPU:0", "GPU:1"], parameter_device)
    index = parameter_device[-1]
    assert len(strategy.extended.worker_devices) == 2
    (device,) = strategy.extended.parameter_devices
    assert device.endswith(f"device:CPU:{index}")
    with strategy.scope():
        assert tf.Variable(1.0).device == device


def test_each_replica_is_executed_on_its_own_worker_device(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    def replica_fn(x: Any) -> Any:
        return jnp.sin(x)

    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(2))
    result = strategy.run(execution(replica_fn), args=(x,))
    devices = [next(iter(piece.devices())) for piece in result.values]
    assert devices == jax.devices()[:2]


def test_a_replica_runs_on_its_slice_of_the_input(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    shapes: list[tuple[int, ...]] = []

    @execution
    def replica_fn(x: Any) -> Any:
        shapes.append(x.shape)
        return x

    dataset = tf.data.Dataset.range(4).batch(4)
    for x in strategy.experimental_distribute_dataset(dataset):
        assert contents(strategy.run(replica_fn, args=(x,))) == [[0, 1], [2, 3]]
    assert set(shapes) == {(2,)}


def test_sync_training_aggregates_before_it_updates(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    with strategy.scope():
        w = tf.Variable(1.0)
        optimizer = dx.Optimizer(optax.sgd(1.0))

    @execution
    def step(x: Any) -> Any:
        _, grad = dx.value_and_grad(lambda x: w * x, w)(x)
        optimizer.apply_gradients([(grad, w)])
        # Both replicas see the sum of both gradients, whatever their own was.
        return grad, w.read_value()

    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(0.25) + ctx.replica_id_in_sync_group
    )
    grads, values = strategy.run(step, args=(x,))
    assert contents(grads) == [0.25, 1.25]
    assert contents(values) == [-0.5, -0.5]


def test_mirrored_variables_are_copies_on_several_devices(strategy: dx.MirroredStrategy) -> None:
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
    v.assign([3.0, 4.0])
    assert [copy.device[-5:] for copy in v.values] == ["CPU:0", "CPU:1"]
    assert [copy.numpy().tolist() for copy in v.values] == [[3.0, 4.0], [3.0, 4.0]]


@pytest.mark.parametrize(("op", "expected"), [("SUM", 3.0), ("MEAN", 1.5)])
def test_a_reduction_makes_one_value_and_all_reduce_gives_it_to_all(
    strategy: dx.MirroredStrategy, execution: Decorator, op: str, expected: float
) -> None:
    @execution
    def replica_fn(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(op, x)

    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(1.0) + ctx.replica_id_in_sync_group
    )
    assert float(strategy.reduce(op, x, axis=None)) == expected
    everywhere = strategy.run(replica_fn, args=(x,))
    assert contents(everywhere) == [expected, expected]
    assert [next(iter(p.devices())) for p in everywhere.values] == jax.devices()[:2]


# The default strategy.


def test_default_strategy_has_the_same_api() -> None:
    strategy = tf.distribute.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.run(lambda x: x + 1, args=(1,)) == 2
    assert strategy.reduce("SUM", 3.0, axis=None) == 3.0
    assert float(strategy.reduce("MEAN", jnp.asarray([1.0, 3.0]), axis=0)) == 2.0
    assert strategy.gather(jnp.asarray([1, 2]), axis=0).tolist() == [1, 2]
    assert strategy.experimental_local_results(3) == (3,)
    values = strategy.experimental_distribute_values_from_function(
        lambda ctx: ctx.num_replicas_in_sync
    )
    assert values == 1
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert [x.tolist() for x in dataset] == [[0, 1], [2, 3]]
    with strategy.scope():
        assert not tf.distribute.in_cross_replica_context()
        v = tf.Variable(1.0)
    assert strategy.extended.update(v, lambda v, x: float(v.assign(x)), args=(2.0,)) == 2.0
    ctx = tf.distribute.get_replica_context()
    assert float(ctx.all_reduce("SUM", 4.0)) == 4.0
    assert ctx.merge_call(lambda strategy, x: strategy.reduce("SUM", x, axis=None), args=(5,)) == 5


def test_default_strategy_merge_call_is_in_the_cross_replica_context() -> None:
    seen: list[bool] = []

    def merge_fn(strategy: dx.Strategy) -> None:
        seen.extend((tf.distribute.in_cross_replica_context(), tf.distribute.has_strategy()))

    tf.distribute.get_replica_context().merge_call(merge_fn)
    assert seen == [True, False]


# The functions.


def test_experimental_set_strategy_needs_no_scope(strategy: dx.MirroredStrategy) -> None:
    tf.distribute.experimental_set_strategy(strategy)
    try:
        assert tf.distribute.has_strategy()
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_replica_context() is None
        assert len(tf.Variable(1.0).devices) == 2
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
    finally:
        tf.distribute.experimental_set_strategy(None)
    assert not tf.distribute.has_strategy()


def test_experimental_set_strategy_is_refused_inside_a_scope(
    strategy: dx.MirroredStrategy,
) -> None:
    with strategy.scope(), pytest.raises(RuntimeError, match="experimental_set_strategy"):
        tf.distribute.experimental_set_strategy(strategy)


def test_get_loss_reduction_is_a_reduce_op() -> None:
    assert tf.distribute.get_loss_reduction() is tf.distribute.ReduceOp.SUM

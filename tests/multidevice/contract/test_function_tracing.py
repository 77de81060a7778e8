"""How often a function's Python code runs: once for each signature, and for a loop of steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH


class _Model:
    """A model that counts how often its step is traced, with state of several kinds."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.num_traces = 0
        with strategy.scope():
            self.w = dx.Variable(jnp.ones(2), name="w")
            self.count = dx.Variable(
                0, synchronization="ON_READ", aggregation="SUM", name="count", dtype=jnp.int32
            )
            self.unused = dx.Variable(jnp.ones(3), synchronization="ON_READ", aggregation="SUM")
            self.optimizer = dx.Optimizer(optax.sgd(0.125, momentum=0.5))

    def replica_step(self, x: jax.Array) -> jax.Array:
        self.num_traces += 1
        self.count.assign_add(jnp.asarray(x.shape[0], jnp.int32))

        def loss() -> jax.Array:
            return dx.compute_average_loss((x * self.w[0] - self.w[1]) ** 2, global_batch_size=4)

        value, gradients = dx.value_and_grad(loss, [self.w])()
        self.optimizer.apply_gradients(zip(gradients, [self.w], strict=True))
        return value

    def step(self, x: Any) -> Any:
        return self.strategy.reduce(
            "SUM", self.strategy.run(self.replica_step, args=(x,)), axis=None
        )


def _batches(strategy: Any, size: int = 12) -> Any:
    per_replica = max(1, 12 // strategy.num_replicas_in_sync)
    rows = np.resize(BATCH / 12, size * 12)
    dataset = dx.data.Dataset.from_tensor_slices(rows).batch(
        per_replica * strategy.num_replicas_in_sync
    )
    return iter(strategy.experimental_distribute_dataset(dataset))


def _state(model: _Model) -> list[float]:
    state = [*model.w.numpy().tolist(), float(model.count.read_value())]
    return [*state, float(model.optimizer.iterations.read_value())]


def test_the_code_runs_once_on_the_first_call(strategy: Any) -> None:
    model, same = _Model(strategy), _Model(strategy)
    step = dx.function(model.step)
    for x, again in zip(_batches(strategy, 3), _batches(strategy, 3), strict=True):
        np.testing.assert_allclose(step(x), same.step(again), rtol=1e-5)
    assert model.num_traces == step.trace_count == 1
    np.testing.assert_allclose(_state(model), _state(same), rtol=1e-5)


@pytest.mark.parametrize("way", ["range", "while", "method", "nested"])
def test_a_loop_of_steps_is_one_trace(strategy: Any, way: str) -> None:
    model, same = _Model(strategy), _Model(strategy)
    iterator = _batches(strategy, 7)

    def take_steps(self: Any = model) -> Any:
        total, left = jnp.zeros(()), 5
        if way == "while":
            while left:
                total, left = total + self.step(next(iterator)), left - 1
        for _ in range(left):
            total += self.compiled(next(iterator)) if way == "nested" else self.step(next(iterator))
        return total

    model.compiled = dx.function(model.step)  # type: ignore[attr-defined]
    if way == "method":
        function = dx.function(type("Loop", (_Model,), {"go": take_steps}).go.__get__(model))
    else:
        function = dx.function(take_steps)
    expected = sum(float(same.step(x)) for x in list(_batches(strategy, 7))[:5])
    assert float(function()) == pytest.approx(expected, rel=1e-5)
    assert model.num_traces <= 2
    # The input ends in the third step: the two before it count.
    with pytest.raises(dx.OutOfRangeError):
        function()
    assert model.num_traces <= 2
    for x in list(_batches(strategy, 7))[5:]:
        same.step(x)
    np.testing.assert_allclose(_state(model), _state(same), rtol=1e-5)


def test_several_elements_without_steps_are_one_program(strategy: Any) -> None:
    iterator, traces = iter(dx.data.Dataset.from_tensor_slices(BATCH[:8])), []
    with strategy.scope():
        total = dx.Variable(0.0)

    @dx.function
    def add_three() -> jax.Array:
        traces.append(1)
        for _ in range(3):
            total.assign_add(next(iterator))
        return total.read_value()

    assert [float(add_three()), float(add_three())] == [3.0, 15.0]
    assert len(traces) == add_three.trace_count == 1
    with pytest.raises(StopIteration):
        add_three()
    assert float(total.read_value()) == 28.0


def test_several_iterators_in_a_loop(strategy: Any) -> None:
    left, right = _batches(strategy, 4), _batches(strategy, 4)
    traces = []

    def difference(x: jax.Array, y: jax.Array) -> jax.Array:
        traces.append(1)
        return jnp.sum(2 * x - y)

    @dx.function
    def compare() -> Any:
        total = jnp.zeros(())
        for _ in range(4):
            parts = strategy.run(difference, args=(next(left), next(right)))
            total += strategy.reduce("SUM", parts, axis=None)
        return total

    assert float(compare()) == pytest.approx(4 * BATCH.sum() / 12, rel=1e-5)
    assert len(traces) <= 2


def test_state_created_in_replicas_by_the_first_call(strategy: Any) -> None:
    made: dict[str, Any] = {}

    def replica(x: jax.Array) -> jax.Array:
        if not made:
            made["count"] = dx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            made["scale"] = dx.Variable(2.0)
        made["count"].assign_add(jnp.sum(x))
        return jnp.sum(x * made["scale"])

    @dx.function
    def step(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)

    with strategy.scope():
        for x in _batches(strategy, 2):
            assert float(step(x)) == pytest.approx(2 * BATCH.sum() / 12, rel=1e-5)
    assert float(made["count"].read_value()) == pytest.approx(2 * BATCH.sum() / 12, rel=1e-5)


def test_settings_of_jax_are_part_of_the_signature(any_strategy: Any) -> None:
    step = dx.function(lambda x: x / 3)
    assert step(1.0).dtype == jnp.float32
    with jax.enable_x64(True):
        assert step(1.0).dtype == jnp.float64
    assert step(1.0).dtype == jnp.float32
    assert step.trace_count == 2


def test_a_value_in_each_replica_of_another_strategy() -> None:
    pair = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    other = dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with other.scope():
        count = dx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    with pytest.raises(RuntimeError, match=r"belongs to a MirroredStrategy, and was used"):
        dx.function(lambda: pair.run(lambda: count.read_value()))()


def test_eager_replicas_call_a_function_together(strategy: Any) -> None:
    model, same = _Model(strategy), _Model(strategy)

    class Stepper:
        @dx.function
        def go(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
            return model.replica_step(x) * scale

    compiled, stepper = dx.function(model.replica_step), Stepper()
    ways = [
        lambda x: strategy.run(lambda x: compiled(x), args=(x,)),
        lambda x: strategy.extended.call_for_each_replica(compiled, args=(x,)),
        lambda x: strategy.run(stepper.go, args=(x,)),
        lambda x: strategy.run(lambda x: stepper.go(x, scale=2.0) / 2, args=(x,)),
    ]
    for x, again, way in zip(
        _batches(strategy, 8), _batches(strategy, 8), [*ways, *ways], strict=True
    ):
        parts = strategy.reduce("SUM", way(x), axis=None)
        np.testing.assert_allclose(parts, same.step(again), rtol=1e-5)
    assert model.num_traces <= 4
    np.testing.assert_allclose(_state(model), _state(same), rtol=1e-5)


def test_eager_replicas_that_do_not_all_call_a_function() -> None:
    # Replicas of one process: workers cannot know what the others call.
    pair = dx.MirroredStrategy(["CPU:0", "CPU:1"])

    @dx.function
    def double(x: jax.Array) -> jax.Array:
        if x.shape == (3,):
            raise KeyError("three")
        return x * 2

    def replica(x: jax.Array) -> Any:
        here = dx.get_replica_context()
        first = double(x) if here.replica_id_in_sync_group == 0 else x
        total = here.all_reduce("SUM", double(first))
        try:
            double(jnp.ones(3))
        except KeyError:
            total += 1
        gradient = jax.grad(lambda x: double(x))(1.0)
        return total + gradient

    values = pair.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(context.replica_id_in_sync_group + 1.0)
    )
    result = pair.run(replica, args=(values,))
    # Twice 1, doubled by the first replica alone, and twice 2; one for the error; the gradient.
    assert [float(part) for part in pair.experimental_local_results(result)] == [11.0, 11.0]

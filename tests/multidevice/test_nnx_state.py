"""The state that replicas write as they run NNX modules: statistics, random keys, metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

import distribax as dx
from tests.environment import COMPLETE
from tests.multidevice.contract.cases import Case, close, replica_number
from tests.multidevice.nnx_models import INPUTS, LABELS, Noisy, make, numbers, train


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


@pytest.fixture
def pair(compiled: bool) -> Case:
    return Case("mirrored", 2, compiled)


@pytest.fixture(
    params=[(kind, count) for kind in ("mirrored", "central") for count in (2, 3, 4)]
    if COMPLETE
    else [("mirrored", 3), ("central", 2)],
    ids=str,
)
def several(request: pytest.FixtureRequest, compiled: bool) -> Case:
    return Case(*request.param, compiled)


@pytest.fixture(params=[("default", 1), ("one_device", 1), ("mirrored", 1)], ids=str)
def alone(request: pytest.FixtureRequest, compiled: bool) -> Case:
    return Case(*request.param, compiled)


def _pieces(case: Case, batch: np.ndarray) -> list[np.ndarray]:
    return np.split(batch, case.num_replicas)


# Batch normalisation.


def test_statistics_are_the_mean_over_replicas(several: Case) -> None:
    norm = nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0))
    alone = [nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0)) for _ in range(several.num_replicas)]
    step = several.step(lambda x: several.strategy.run(norm, args=(x,)))
    for x in INPUTS:
        outputs = step(several.split(x))
        expected = [one(piece) for one, piece in zip(alone, _pieces(several, x), strict=True)]
        close(several.parts(outputs), expected, 1e-5)
    close(norm.mean[...], sum(one.mean[...] for one in alone) / len(alone), 1e-5)
    close(norm.var[...], sum(one.var[...] for one in alone) / len(alone), 1e-5)


def test_replicas_without_examples_leave_state_alone(several: Case) -> None:
    """A last batch of one example: all replicas but one have none, whose mean is NaN."""
    norm = nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0))
    average, total = nnx.metrics.Average(), nnx.metrics.Average()
    plain = nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0))

    def replica_step(x: Any) -> Any:
        loss = jnp.mean(norm(x))
        average.update(values=jnp.mean(x))
        total.update(values=x)
        return loss

    step = several.step(lambda x: several.strategy.run(replica_step, args=(x,)))
    x = INPUTS[0, :1]
    for _ in range(2):
        step(several.split(x))
        plain(x)
    close([norm.mean[...], norm.var[...]], [plain.mean[...], plain.var[...]], 1e-5)
    close([average.compute(), total.compute()], [x.mean(), x.mean()], 1e-5)
    assert int(average.count[...]) == 2
    if several.compiled:
        assert step.trace_count == 1  # type: ignore[attr-defined]


def test_what_a_module_meets_beside_its_arguments(several: Case) -> None:
    """Values that were found, variables in functions of JAX, rows with their numbers."""
    linear = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    batch = INPUTS[0, : 2 * several.num_replicas - 1]
    found, scale = several.split(batch), several.variable(2.0)

    def replica_step() -> Any:
        y = jnp.multiply(linear(found.get()), scale)
        rows = dx.IndexedSlices(y[:1], jnp.array([1]))
        total = dx.get_replica_context().all_reduce("SUM", rows)
        return y, jnp.zeros((2, 3)).at[total.indices].add(total.values)

    ys, totals = several.step(lambda: several.strategy.run(replica_step))()
    expected = [2.0 * linear(piece) for piece in several.parts(found)]
    close(several.parts(ys), expected, 1e-5)
    whole = [np.zeros(3), sum(np.asarray(y[0]) for y in expected)]
    close(several.parts(totals), [whole] * several.num_replicas, 1e-5)


def test_one_replica_is_plain_nnx(alone: Case) -> None:
    model, optimizer = make(Noisy)
    plain, plain_optimizer = make(Noisy)
    step = alone.step(lambda x, y: alone.strategy.run(train, args=(model, optimizer, x, y)))
    for x, y in zip(INPUTS, LABELS, strict=True):
        close(step(alone.split(x), alone.split(y)), train(plain, plain_optimizer, x, y), 1e-5)
    close(numbers(model, optimizer), numbers(plain, plain_optimizer), 1e-5)


def test_eager_and_compiled_are_the_same() -> None:
    states = []
    for compiled in (False, True):
        case = Case("mirrored", 2, compiled)
        model, optimizer = make(Noisy)
        step = case.step(lambda *args, case=case: case.strategy.run(train, args=args))
        for x, y in zip(INPUTS, LABELS, strict=True):
            step(model, optimizer, case.split(x), case.split(y))
        states.append(numbers(model, optimizer))
    close(*states, 1e-4)


# Random numbers.


def test_dropout_differs_between_replicas_and_steps(several: Case) -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = jax.random.key_data(dropout.rngs.key[...])
    step = several.step(lambda x: several.strategy.run(dropout, args=(x,)))
    ones = several.each(lambda _: jnp.ones((8, 8)))
    masks = {part.tobytes() for _ in range(2) for part in several.parts(step(ones))}
    assert len(masks) == 2 * several.num_replicas
    assert int(dropout.rngs.count[...]) == 2
    assert (jax.random.key_data(dropout.rngs.key[...]) == key).all()


def test_random_state_that_is_split_for_a_while(pair: Case) -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    before = jax.random.key_data(dropout.rngs.key[...])

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None))
    def thrice(dropout: Any, x: Any) -> Any:
        return dropout(x)

    output = pair.run(lambda x: thrice(dropout, x), pair.split(np.ones((2, 64), np.float32)))
    masks = {row.tobytes() for part in pair.parts(output) for row in part}
    assert len(masks) == 3 * 2
    assert (jax.random.key_data(dropout.rngs.key[...]) == before).all()


def test_new_seeds_are_those_of_the_first_replica(pair: Case) -> None:
    dropout, plain = (nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    pair.run(lambda: nnx.reseed(dropout, default=7))
    nnx.reseed(plain, default=7)
    close(numbers(dropout), numbers(plain), 0.0)


def test_a_key_can_be_split_in_place(pair: Case) -> None:
    key = nnx.Variable(jax.random.key(0))
    pair.run(lambda: key.set_value(jax.random.split(key.get_value())[0]))
    expected = jax.random.split(jax.random.key(0))[0]
    assert (jax.random.key_data(key.get_value()) == jax.random.key_data(expected)).all()


# Metrics.


def _metrics() -> nnx.MultiMetric:
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        average=nnx.metrics.Average("values"),
        spread=nnx.metrics.Welford("values"),
    )


def _measured(x: Any, y: Any) -> dict[str, Any]:
    return {"logits": x[:, :3], "labels": y, "values": x.sum(axis=1)}


@pytest.mark.parametrize("reset", [False, True])
def test_metrics_are_exact(several: Case, reset: bool) -> None:
    metrics, plain = _metrics(), _metrics()
    labels = (np.arange(12) % 3).astype(np.int32)

    def replica_step(x: Any, y: Any) -> None:
        if reset:
            metrics.reset()
        metrics.update(**_measured(x, y))

    step = several.step(lambda x, y: several.strategy.run(replica_step, args=(x, y)))
    for x, size in zip(INPUTS, (12, 12, 8), strict=True):
        step(several.split(x[:size]), several.split(labels[:size]))
        if reset:
            plain.reset()
        plain.update(**_measured(jnp.asarray(x[:size]), jnp.asarray(labels[:size])))
    close(metrics.compute(), plain.compute(), 1e-5)


def test_a_metric_tells_what_it_misses(pair: Case) -> None:
    spread = nnx.metrics.Welford("values")
    with pytest.raises(TypeError, match="Expected keyword argument 'values'"):
        pair.run(lambda: spread.update(other=1.0))


# Variables that a replica writes itself.


def test_floats_are_averaged_and_whole_numbers_taken_from_the_first(pair: Case) -> None:
    param = nnx.Param(jnp.ones(3))
    flag, count, number = nnx.Variable(jnp.array(True)), nnx.Variable(jnp.array(0)), nnx.Variable(2)

    def write() -> Any:
        param[...] = param[...] * replica_number()
        param[1:] = param[1:] + 1.0
        flag.set_value(~flag.get_value())
        count[...] += jnp.asarray(10 * replica_number(), jnp.int32)
        number.set_value(7)
        return param[...]

    assert pair.numbers(pair.run(write)) == [[1.0, 2.0, 2.0], [2.0, 3.0, 3.0]]
    assert param[...].tolist() == [1.5, 2.5, 2.5]
    assert [bool(flag.get_value()), int(count[...]), int(number.get_value())] == [False, 10, 7]


def test_a_variable_can_hold_a_nest(pair: Case) -> None:
    nest = nnx.Variable({"a": jnp.ones(2), "b": (np.zeros(3), 1)})

    def write() -> None:
        value = nest.get_value()
        value["a"] = value["a"] * 2 * replica_number()
        nest.set_value(value)

    pair.run(write)
    close(nest.get_value(), {"a": np.full(2, 3.0), "b": (np.zeros(3), 1)})


def test_values_that_are_no_numbers_are_left_alone(pair: Case) -> None:
    text = nnx.Variable("text")
    assert pair.run(lambda: text.get_value()) == "text"


def test_variables_outside_of_replicas(compiled: bool) -> None:
    case = Case("mirrored", 2, compiled)
    model, optimizer = make()

    def norm() -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))

    @case.step
    def step(x: Any, y: Any) -> Any:
        before = norm()
        case.strategy.run(train, args=(model, optimizer, x, y))
        after = norm()
        model.out.bias[...] = jnp.full(3, 5.0)
        return before, after

    plain, plain_optimizer = make()
    for x, y in zip(INPUTS, LABELS, strict=True):
        before, after = (float(value) for value in step(case.split(x), case.split(y)))
        train(plain, plain_optimizer, x, y)
        plain_after = sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(nnx.state(plain)))
        close(after, plain_after, 1e-4)
        assert before != after
        plain.out.bias[...] = jnp.full(3, 5.0)
    close(numbers(model), numbers(plain), 1e-5)


def test_a_merge_function_sees_the_shared_value(pair: Case) -> None:
    param = nnx.Param(jnp.ones(2))

    def read(strategy: Any) -> Any:
        return param[...] * 2

    merged = pair.run(lambda: dx.get_replica_context().merge_call(read))
    assert pair.numbers(merged) == [[2.0, 2.0]] * 2


def test_a_variable_may_change_its_shape_between_steps(pair: Case) -> None:
    param = nnx.Param(jnp.ones(2))
    double = pair.step(lambda: pair.strategy.run(lambda: param.set_value(param[...] * 2)))
    double()
    param.set_value(jnp.ones((2, 2)))
    double()
    assert param[...].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_intermediates_are_captured(pair: Case) -> None:
    class Sower(nnx.Module):
        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "seen", x.sum())
            return x

    sower = Sower()
    run = lambda x: nnx.capture(sower, nnx.Intermediate)(x)  # noqa: E731
    _, seen = pair.run(run, pair.split(np.arange(4.0, dtype=np.float32)))
    assert pair.numbers(seen["seen"].get_value()[0]) == [1.0, 5.0]
    assert not hasattr(sower, "seen")


def test_the_mode_may_be_set_inside_a_step(pair: Case) -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def evaluate(x: Any) -> Any:
        dropout.eval()
        return dropout(x)

    assert pair.numbers(pair.run(evaluate, pair.split(np.ones(4, np.float32)))) == [[1.0] * 2] * 2
    dropout.train()
    assert not dropout.deterministic


def test_methods_of_modules_can_be_functions() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.array(0))

        @dx.function
        def step(self) -> Any:
            self.count[...] += 1

    counter = Counter()
    counter.step()
    clone = nnx.clone(counter)
    clone.step()
    copied = copy.deepcopy(clone)
    for _ in range(2):
        copied.step()
    assert [int(one.count[...]) for one in (counter, clone, copied)] == [1, 2, 4]


# Errors.


def _fails(case: Case, fn: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        case.run(fn)


def test_references_are_refused(pair: Case) -> None:
    param = nnx.Param(jnp.ones(2), ref=True)
    _fails(pair, lambda: param[...], ValueError, "nnx.Param holds a jax.Ref.*ref=False")


def test_hijax_variables_are_refused(pair: Case) -> None:
    param = nnx.Param(jnp.ones(2), hijax=True)
    _fails(pair, lambda: param[...], ValueError, "hijax variable.*hijax=False")
    assert param[...].tolist() == [1.0, 1.0]


def test_what_is_written_must_be_arrays(pair: Case) -> None:
    param = nnx.Param(jnp.ones(2))
    _fails(pair, lambda: param.set_value("x"), TypeError, r"shape \(2,\) was given 'x'")


def test_replicas_must_write_the_same_variables() -> None:
    params = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(3))

    def write() -> None:
        param = params[dx.get_replica_context().replica_id_in_sync_group]
        param.set_value(param[...] * 2)

    message = r"replica 1 has written other variables .*\(2,\), nnx.Param of shape \(3,\)"
    _fails(Case("mirrored", 2, compiled=False), write, RuntimeError, message)


def test_replicas_must_write_values_of_the_same_form() -> None:
    cache = nnx.Cache(jnp.ones(2))

    def write() -> None:
        cache.set_value(jnp.ones(dx.get_replica_context().replica_id_in_sync_group))

    message = r"different form to nnx.Cache .*\[\[\(0,\)\], \[\(1,\)\]\].*return such a value"
    _fails(Case("mirrored", 2, compiled=False), write, ValueError, message)


def test_modules_are_made_before_compiled_steps() -> None:
    made: list[nnx.Linear] = []

    @dx.function
    def step(x: Any) -> Any:
        if not made:
            made.append(nnx.Linear(5, 2, rngs=nnx.Rngs(0)))
        return made[0](x)

    step(INPUTS[0])
    with pytest.raises(RuntimeError, match=r"nnx.Param of shape \(5, 2\) was made while another"):
        step(INPUTS[0, :3])


def test_missing_gradients_are_told_by_nnx(pair: Case) -> None:
    model, optimizer = make()
    _fails(pair, lambda: optimizer.update(model), TypeError, "Missing required argument `grads`")


def test_a_variable_is_not_written_inside_a_transformation(pair: Case) -> None:
    param = nnx.Param(jnp.ones(2))

    def write() -> Any:
        return jax.jit(lambda x: param.set_value(x))(jnp.zeros(2))

    _fails(pair, write, TraceContextError, "Cannot mutate Param from a different trace level")


@pytest.mark.parametrize("given", [False, True])
def test_static_attributes_are_noticed(given: bool) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    x, traces = jnp.ones((4, 3)), []

    def apply(model: Any, x: jax.Array) -> Any:
        traces.append(1)
        return strategy.run(lambda x: model(x), args=(x,))

    captured = dx.function(lambda x: apply(model, x))
    passed = dx.function(apply)
    step = (lambda: passed(model, x)) if given else (lambda: captured(x))

    def has_zeros() -> bool:
        return bool((np.asarray(strategy.experimental_local_results(step())[0]) == 0).any())

    for _ in range(2):
        model.train()
        assert has_zeros()
        model.eval()
        assert not has_zeros() and not has_zeros()
    assert len(traces) == 2
    model.train()
    model.layers[1].rate = 0.0
    assert not has_zeros()
    model.layers[0].bias = nnx.Param(jnp.full(3, 5.0))
    assert float(strategy.experimental_local_results(step())[0].mean()) > 2
    assert len(traces) == 4
    model.layers[1].note = "new"
    del model.layers[1].note
    step()
    assert len(traces) == 4

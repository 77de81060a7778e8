"""Flax NNX models are trained in replicas as they are, with the results of one device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribax as dx
from tests.conftest import RunFresh
from tests.environment import COMPLETE
from tests.multidevice.contract.cases import SETUPS, Case, close
from tests.multidevice.nnx_models import (
    BATCH_SIZE,
    INPUTS,
    LABELS,
    MLP,
    batches,
    make,
    mean_loss,
    numbers,
    train,
    trained,
)

TOLERANCE = 1e-5
ADAM = optax.adam(1e-2)


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


# Parameter servers hold `dx.Variable`s alone.
_LOCAL = [setup for setup in SETUPS if setup[0] != "served"]


@pytest.fixture(params=_LOCAL, ids=lambda setup: f"{setup[0]}{setup[1]}")
def case(request: pytest.FixtureRequest, compiled: bool) -> Case:
    return Case(*request.param, compiled)


@pytest.fixture(
    # The first two share their code.
    params=[("default", 1), ("one_device", 1), ("mirrored", 2), ("central", 2)][not COMPLETE :],
    ids=lambda setup: f"{setup[0]}{setup[1]}",
)
def small(request: pytest.FixtureRequest, compiled: bool) -> Case:
    return Case(*request.param, compiled)


@pytest.fixture
def pair(compiled: bool) -> Case:
    return Case("mirrored", 2, compiled)


def _train_all(case: Case, step: Any) -> list[float]:
    losses = [step(x, y) for x, y in batches(case)]
    return [float(case.strategy.reduce("SUM", loss, axis=None)) for loss in losses]


def test_training_is_that_of_one_device(case: Case) -> None:
    with case.strategy.scope():
        model, optimizer = make(transformation=ADAM)

    def replica_step(x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: mean_loss(model, x, y))(model)
        optimizer.update(model, grads)
        return loss

    @case.step
    def train_step(x: Any, y: Any) -> Any:
        return case.strategy.run(replica_step, args=(x, y))

    losses = _train_all(case, train_step)
    plain_model, plain_optimizer, plain_losses = trained(transformation=ADAM)
    close(losses, plain_losses, TOLERANCE)
    close(numbers(model, optimizer), numbers(plain_model, plain_optimizer), TOLERANCE)
    assert int(optimizer.step[...]) == len(losses)
    if case.compiled:
        assert train_step.trace_count == 1


def test_a_model_can_be_an_argument_of_run(pair: Case) -> None:
    model, optimizer = make()
    step = pair.step(lambda x, y: pair.strategy.run(train, args=(model, optimizer, x, y)))
    _train_all(pair, step)
    close(numbers(model, optimizer), numbers(*trained()[:2]), TOLERANCE)


def test_a_model_can_be_an_argument_of_the_function(pair: Case) -> None:
    step = pair.step(lambda *args: pair.strategy.run(train, args=args))
    for _ in range(2):
        model, optimizer = make()
        _train_all(pair, lambda x, y: step(model, optimizer, x, y))  # noqa: B023
        close(numbers(model, optimizer), numbers(*trained()[:2]), TOLERANCE)
    if pair.compiled:
        assert step.trace_count == 2


def test_a_model_can_be_held_by_other_objects(pair: Case) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.models, self.optimizers = zip(*[make(), make()], strict=True)

    trainer = Trainer()

    def replica_step(x: Any, y: Any, extra: dict[str, Any]) -> Any:
        train(trainer.models[0], trainer.optimizers[0], x, y)
        return train(extra["models"][1], trainer.optimizers[1], x, y)

    extra = {"models": list(trainer.models)}
    step = pair.step(
        lambda x, y: pair.strategy.run(replica_step, args=(x, y), kwargs={"extra": extra})
    )
    _train_all(pair, step)
    plain, _, _ = trained()
    close(numbers(*trainer.models), numbers(plain, plain), TOLERANCE)


def test_a_model_is_returned_as_itself(pair: Case) -> None:
    model, _ = make()
    returned = pair.run(lambda x: (model, model(x)), pair.split(INPUTS[0]))
    assert returned[0] is model
    assert pair.step(lambda: model)() is model


def test_a_function_can_be_run_itself() -> None:
    case = Case("mirrored", 2, compiled=True)
    model, optimizer = make()

    @dx.function
    def replica_step(x: Any, y: Any) -> Any:
        return train(model, optimizer, x, y)

    _train_all(case, lambda x, y: case.strategy.run(replica_step, args=(x, y)))
    close(numbers(model), numbers(trained()[0]), TOLERANCE)
    assert replica_step.trace_count == 1


def test_an_epoch_is_a_loop_over_a_distributed_dataset() -> None:
    case = Case("mirrored", 2, compiled=True)
    model, optimizer = make()
    flat = INPUTS.reshape(-1, 5), LABELS.reshape(-1, 3)
    dataset = dx.data.Dataset.from_tensor_slices(flat).batch(BATCH_SIZE)
    dist_dataset = case.strategy.experimental_distribute_dataset(dataset)

    @dx.function
    def epoch() -> Any:
        total = 0.0
        for x, y in dist_dataset:
            losses = case.strategy.run(train, args=(model, optimizer, x, y))
            total += case.strategy.reduce("SUM", losses, axis=None)
        return total

    plain, _, losses = trained()
    close(float(epoch()), sum(losses), TOLERANCE)
    close(numbers(model), numbers(plain), TOLERANCE)


@pytest.mark.parametrize("kind", ["mirrored", "central"] if COMPLETE else ["mirrored"])
@pytest.mark.parametrize("num_replicas", [2, 3, 4] if COMPLETE else [2, 3])
def test_an_uneven_last_batch_is_exact(kind: str, num_replicas: int, compiled: bool) -> None:
    case = Case(kind, num_replicas, compiled)
    # The last batch leaves the third replica without examples.
    sizes = (7, 12, 4)
    model, optimizer = make()

    @case.step
    def step(x: Any, y: Any, size: Any) -> Any:
        return case.strategy.run(train, args=(model, optimizer, x, y, size))

    for index, size in enumerate(sizes):
        step(case.split(INPUTS[index, :size]), case.split(LABELS[index, :size]), size)
    plain_model, plain_optimizer, _ = trained(sizes)
    close(numbers(model, optimizer), numbers(plain_model, plain_optimizer), TOLERANCE)
    if compiled:
        assert step.trace_count == len(sizes)  # type: ignore[attr-defined]


def test_gradients_can_be_accumulated(pair: Case) -> None:
    accumulate = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    model, optimizer = make(transformation=accumulate)
    _train_all(pair, pair.step(lambda x, y: pair.strategy.run(train, (model, optimizer, x, y))))
    plain, plain_optimizer = make(transformation=accumulate)
    for x, y in zip(INPUTS, LABELS, strict=True):
        train(plain, plain_optimizer, x, y)
    close(numbers(model, optimizer), numbers(plain, plain_optimizer), TOLERANCE)


def test_modules_without_the_graph_protocol(pair: Case) -> None:
    model, optimizer = make()

    def replica_step(x: Any, y: Any) -> Any:
        loss = lambda model: mean_loss(model, x, y)  # noqa: E731
        value, grads = nnx.value_and_grad(loss, graph=False)(model)
        optimizer.update(model, grads)
        return value

    _train_all(pair, pair.step(lambda x, y: pair.strategy.run(replica_step, args=(x, y))))
    close(numbers(model), numbers(trained()[0]), TOLERANCE)


def test_model_and_optimizer_in_one(pair: Case) -> None:
    optimizer = nnx.ModelAndOptimizer(MLP(nnx.Rngs(0)), optax.sgd(0.1, 0.9))

    def replica_step(x: Any, y: Any) -> Any:
        grads = nnx.grad(lambda model: mean_loss(model, x, y))(optimizer.model)
        optimizer.update(grads)
        return jnp.zeros(())

    _train_all(pair, pair.step(lambda x, y: pair.strategy.run(replica_step, args=(x, y))))
    close(numbers(optimizer.model), numbers(trained()[0]), TOLERANCE)


def test_a_line_search_minimises_the_loss_of_all_replicas() -> None:
    def search(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        graph, _ = nnx.split(model)
        loss, grads = nnx.value_and_grad(lambda model: mean_loss(model, x, y))(model)
        value_fn = lambda params: mean_loss(nnx.merge(graph, params), x, y)  # noqa: E731
        optimizer.update(model, grads, grad=grads, value=loss, value_fn=value_fn)
        return loss

    case = Case("mirrored", 2, compiled=True)
    # It takes smaller and smaller steps until the loss falls, and reuses the gradient found there.
    line = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True)
    descent = optax.chain(optax.sgd(1.0), line)
    model, optimizer = make(transformation=descent)
    plain, plain_optimizer = make(transformation=descent)
    step = case.step(lambda x, y: case.strategy.run(search, args=(model, optimizer, x, y)))
    for _ in range(3):
        step(case.split(INPUTS[0]), case.split(LABELS[0]))
        search(plain, plain_optimizer, INPUTS[0], LABELS[0])
    close(numbers(model, optimizer), numbers(plain, plain_optimizer), 1e-3)


def test_layers_that_loop() -> None:
    case = Case("mirrored", 2, compiled=True)

    class Recurrent(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.rnn = nnx.RNN(nnx.SimpleCell(5, 4, rngs=rngs))
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(self.rnn(x)[:, -1])

    model, optimizer = make(Recurrent)
    plain, plain_optimizer = make(Recurrent)
    x, y = np.stack([INPUTS[0], INPUTS[1]], axis=1), LABELS[0]
    step = case.step(lambda x, y: case.strategy.run(train, args=(model, optimizer, x, y)))
    for _ in range(2):
        step(case.split(x), case.split(y))
        train(plain, plain_optimizer, x, y)
    close(numbers(model), numbers(plain), TOLERANCE)


def test_layers_that_are_scanned_and_rematerialised(pair: Case) -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(5, 5, rngs=rngs)

        @nnx.remat
        def __call__(self, x: Any) -> Any:
            return nnx.tanh(self.linear(x))

    class Deep(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(rngs)
            self.out = nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return self.out(scan(lambda layer, x: layer(x))(self.layers, x))

    model, optimizer = make(Deep)
    plain, plain_optimizer = make(Deep)
    step = pair.step(lambda x, y: pair.strategy.run(train, args=(model, optimizer, x, y)))
    for _ in range(2):
        step(pair.split(INPUTS[0]), pair.split(LABELS[0]))
        train(plain, plain_optimizer, INPUTS[0], LABELS[0])
    close(numbers(model), numbers(plain), TOLERANCE)


# Between steps a model is a plain NNX model.


def test_a_trained_model_is_a_plain_module(small: Case) -> None:
    model, optimizer = make()
    _train_all(small, small.step(lambda x, y: small.strategy.run(train, (model, optimizer, x, y))))
    plain, _, _ = trained()
    expected = plain(INPUTS[0])
    committed = jax.device_put(INPUTS[0], jax.devices()[-1])
    close([model(INPUTS[0]), model(committed)], [expected, expected], TOLERANCE)
    close(nnx.jit(lambda model, x: model(x))(model, INPUTS[0]), expected, TOLERANCE)
    assert len(model.hidden.kernel[...].devices()) == 1
    others = [nnx.merge(*nnx.split(model)), nnx.clone(model), copy.deepcopy(model)]
    others.append(pickle.loads(pickle.dumps(model)))
    close(numbers(*others), numbers(*[plain] * 4), TOLERANCE)
    train(model, optimizer, INPUTS[0], LABELS[0])
    assert np.any(np.asarray(model(INPUTS[0])) != np.asarray(expected))


def test_a_model_is_evaluated_in_replicas(small: Case) -> None:
    model, _ = make()
    before = numbers(model)
    outputs = small.run(model, small.split(INPUTS[0]))
    close(small.strategy.gather(outputs, axis=0), model(INPUTS[0]), TOLERANCE)
    close(numbers(model), before, 0.0)


def test_what_is_set_between_steps_counts(small: Case) -> None:
    model, optimizer = make()
    saved = numbers(model, optimizer)
    step = small.step(lambda x, y: small.strategy.run(train, args=(model, optimizer, x, y)))
    _train_all(small, step)
    for node, values in zip((model, optimizer), saved, strict=True):
        nnx.update(node, values)
    _train_all(small, step)
    close(numbers(model, optimizer), numbers(*trained()[:2]), TOLERANCE)


def test_arrays_taken_between_steps_stay(pair: Case) -> None:
    model, optimizer = make()
    step = pair.step(lambda x, y: pair.strategy.run(train, args=(model, optimizer, x, y)))
    taken = []
    for x, y in batches(pair):
        kernel = model.hidden.kernel[...]
        taken.append((kernel, np.array(kernel)))
        step(x, y)
    assert len({copied.tobytes() for _, copied in taken}) == len(taken)
    close(*zip(*taken, strict=True), 0.0)


def test_a_step_that_fails_changes_nothing(pair: Case) -> None:
    model, optimizer = make()
    before = numbers(model, optimizer)

    def fails(x: Any, y: Any) -> Any:
        train(model, optimizer, x, y)
        raise KeyError("no luck")

    with pytest.raises(KeyError, match="no luck"):
        pair.run(fails, *batches(pair)[0])
    close(numbers(model, optimizer), before, 0.0)


def test_strategies_take_turns(compiled: bool) -> None:
    cases = [Case(kind, count, compiled) for kind, count in _LOCAL if count != 4]
    model, optimizer = make()
    plain, plain_optimizer = make()
    steps = [
        case.step(lambda x, y, case=case: case.strategy.run(train, (model, optimizer, x, y)))
        for case in cases
    ]
    for _ in range(2):
        for case, step in zip(cases, steps, strict=True):
            step(case.split(INPUTS[0]), case.split(LABELS[0]))
            train(plain, plain_optimizer, INPUTS[0], LABELS[0])
    close(numbers(model, optimizer), numbers(plain, plain_optimizer), 1e-4)


def test_flax_is_imported_by_the_user_alone(run_fresh: RunFresh) -> None:
    printed = run_fresh(
        """
        import sys
        import distribax as dx
        count = dx.Variable(0)
        dx.function(lambda: count.read_value() + 1)()
        print("flax" in sys.modules)
        from flax import nnx
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        print(dx.function(lambda x: model(x))(model.kernel[...]).shape)
        """
    )
    assert printed.splitlines() == ["False", "(2, 2)"]


def test_a_flax_that_does_not_fit_is_told_once(run_fresh: RunFresh) -> None:
    printed = run_fresh(
        """
        import sys, types, warnings
        import distribax as dx
        flax, nnx = types.ModuleType("flax"), types.ModuleType("flax.nnx")
        flax.nnx = nnx
        sys.modules.update({"flax": flax, "flax.nnx": nnx})
        double = dx.function(lambda x: x * 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(float(double(2.0)), float(double(3.0)))
        print(len(caught), "pip install 'distribax[flax]'" in str(caught[0].message))
        """
    )
    assert printed.splitlines() == ["4.0 6.0", "1 True"]

"""Training on 1 to 4 replicas gives what training on one device gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close, replica_number

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(31, 3)).astype(np.float32)
Y = (X @ np.asarray([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)
BATCHES = [(X[start : start + 12], Y[start : start + 12]) for start in (0, 12, 24)]
"""Two batches of 12, and a last one of 7 that splits unevenly."""

TRANSFORMATIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.exponential_decay(0.1, 2, 0.5))
    ),
}


def _loss(w: Any, b: Any, x: Any, y: Any, size: int) -> Any:
    return dx.compute_average_loss((x @ w + b - y) ** 2, global_batch_size=size)


@cache
def _reference(name: str, every: int = 1) -> Any:
    """Returns what plain JAX on one device gives after two epochs: parameters and losses."""
    params: Any = (jnp.zeros(3), jnp.zeros(()))
    transformation = TRANSFORMATIONS[name]()
    if every > 1:
        transformation = optax.MultiSteps(transformation, every).gradient_transformation()
    state = transformation.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p[0] + p[1] - y) ** 2))(params)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for x, y in BATCHES * 2:
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return params, losses


def _train(case: Case, optimizer: dx.Optimizer) -> Any:
    strategy = case.strategy
    w, b = case.variable([0.0, 0.0, 0.0], name="w"), case.variable(0.0, name="b")

    def replica_fn(x: Any, y: Any, size: int) -> Any:
        loss, grads = dx.value_and_grad(lambda: _loss(w.value(), b.value(), x, y, size), [w, b])()
        optimizer.apply_gradients(zip(grads, [w, b], strict=True))
        return loss

    def train_step(x: Any, y: Any, size: int) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_fn, args=(x, y, size)), axis=None)

    step = dx.function(train_step, static_argnums=2) if case.compiled else train_step
    losses = [float(step(*case.split((x, y)), len(x))) for x, y in BATCHES * 2]
    return (w, b), losses


def test_training_equals_one_device(case: Case) -> None:
    _compare_with_one_device(case, "adam")


def test_momentum_equals_one_device(mirrored: Case) -> None:
    _compare_with_one_device(mirrored, "momentum")


def _compare_with_one_device(case: Case, name: str) -> None:
    with case.strategy.scope():
        optimizer = dx.Optimizer(TRANSFORMATIONS[name]())
    variables, losses = _train(case, optimizer)
    wanted, expected = _reference(name)
    close(losses, expected, 1e-4)
    close(list(variables), list(wanted), 1e-4)
    assert int(optimizer.iterations) == 6
    for variable in variables:
        copies = case.parts(variable)
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)


def test_gradients_accumulate(mirrored: Case) -> None:
    case = mirrored
    with case.strategy.scope():
        optimizer = dx.Optimizer(TRANSFORMATIONS["adam"](), gradient_accumulation_steps=2)
    variables, losses = _train(case, optimizer)
    wanted, expected = _reference("adam", every=2)
    close(losses, expected, 1e-4)
    close(list(variables), list(wanted), 1e-4)


def test_gradients_applied_outside_the_replicas(case: Case) -> None:
    w = case.variable([1.0, 2.0])
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1))
    gradient = case.each(lambda index: jnp.full((2,), index + 1.0))

    def across(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, w)])

    n = case.num_replicas
    total = n * (n + 1) / 2
    case.across(across, gradient)
    close(w, np.asarray([1.0, 2.0]) - 0.1 * total)
    # One value for all has been combined already: as an array, or mirrored.
    mirrored = case.run(lambda g: dx.get_replica_context().all_reduce("SUM", g), gradient)
    case.across(across, mirrored)
    case.across(across, jnp.full((2,), total))
    close(w, np.asarray([1.0, 2.0]) - 0.3 * total, 1e-5)
    case.step(across)(gradient)
    close(w, np.asarray([1.0, 2.0]) - 0.4 * total, 1e-5)


def test_an_optimizer_belongs_to_its_variables_strategy(several: Case) -> None:
    w = dx.Variable(1.0, name="w")
    optimizer = dx.Optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"variable 'w'.*not .*created"):
        several.run(lambda: optimizer.apply_gradients([(jnp.ones(()) * 1.0, w)]))


def test_the_mean_of_gradients(case: Case) -> None:
    w = case.variable(1.0)
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(1.0), reduce_op="mean", name="Mine")

    def replica_fn() -> Any:
        number = jnp.asarray(dx.get_replica_context().replica_id_in_sync_group, jnp.float32) + 1
        optimizer.apply_gradients([(number, w)])

    case.run(replica_fn)
    close(w, 1.0 - (case.num_replicas + 1) / 2)
    assert optimizer.variables[0].name == "Mine/iterations:0"


@pytest.mark.parametrize(
    "arguments",
    [{"experimental_aggregate_gradients": False}, {"skip_gradients_aggregation": True}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_gradients_that_are_combined_already(small: Case, arguments: Any) -> None:
    """The replicas have combined them, as programs for TensorFlow do to clip them."""
    w, table = small.variable(1.0), small.variable(jnp.ones((3, 1)))
    optimizer = dx.Optimizer(optax.sgd(1.0))

    def replica_fn() -> None:
        rows = dx.IndexedSlices(jnp.ones((1, 1)), jnp.asarray([1]))
        context = dx.get_replica_context()
        grads = context.all_reduce("SUM", (replica_number(), rows))
        optimizer.apply_gradients(zip(grads, (w, table), strict=True), **arguments)

    small.run(replica_fn)
    count = small.num_replicas
    assert [float(copy) for copy in w.values] == [1.0 - count * (count + 1) / 2] * len(w.values)
    close(table, [[1.0], [1.0 - count], [1.0]])
    with pytest.raises(TypeError, match="global_step is an argument of TensorFlow 1"):
        optimizer.apply_gradients([(1.0, w), (None, table)], global_step=w)


def test_slots_live_beside_their_variables(case: Case) -> None:
    w = case.variable([1.0, 2.0], name="w")
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.adam(0.1))
        optimizer.build([w])
    count, first, second = optimizer.variables[1:]
    assert first.devices == second.devices == w.devices
    assert (first.shape, count.shape) == ((2,), ())
    assert all(not variable.trainable for variable in optimizer.variables)
    case.run(lambda: optimizer.apply_gradients([(jnp.ones(2), w)]))
    assert len(optimizer.variables) == 4
    n = case.num_replicas
    close(first, [0.1 * n] * 2)


def test_variables_without_a_gradient_stay_as_they_are(case: Case) -> None:
    """The expected numbers are those of TensorFlow's SGD with momentum."""
    a, b = case.variable(1.0, name="a"), case.variable(1.0, name="b")
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1, momentum=0.9), reduce_op="mean")
    steps: dict[Any, tuple[list[Any], list[float]]] = {
        "one has none": ([(None, a), (1.0, b)], [1.0, 0.9]),
        "both": ([(1.0, a), (1.0, b)], [0.9, 0.71]),
        "another order": ([(2.0, b), (1.0, a)], [0.71, 0.339]),
        "only one is given": ([(1.0, b)], [0.71, -0.0949]),
        "the other again": ([(1.0, a)], [0.439, -0.0949]),
    }
    for pairs, expected in steps.values():
        case.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        close([float(a), float(b)], expected)
    assert int(optimizer.iterations) == len(steps)


def test_per_replica_gradients_of_some_variables(case: Case) -> None:
    a, b = case.variable(1.0), case.variable(1.0)
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1), reduce_op="mean")
        optimizer.build([a, b])
        optimizer.apply_gradients([(case.run(lambda: jnp.ones(())), b)])
    close([float(a), float(b)], [1.0, 0.9])


def test_minimize_does_both(case: Case) -> None:
    w = case.variable(2.0)
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1))
    loss = case.run(lambda: optimizer.minimize(lambda: w * w, [w]))
    n = case.num_replicas
    close(case.parts(loss), [4.0] * n)
    close(w, 2.0 - 0.1 * 4.0 * n)


def test_extra_arguments_reach_the_transformation(small: Case) -> None:
    case = small
    transformation = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    w = case.variable(1.0)
    with case.strategy.scope():
        optimizer = dx.Optimizer(optax.chain(optax.sgd(1.0), transformation))
    case.across(lambda: optimizer.apply_gradients([(jnp.asarray(1.0), w)], value=jnp.asarray(1.0)))
    assert float(w) == 0.0


def test_plain_optax_and_pytrees(mirrored: Case) -> None:
    case = mirrored
    transformation = TRANSFORMATIONS["adam"]()
    params: Any = (jnp.zeros(3), jnp.zeros(()))
    state: Any = transformation.init(params)

    def replica_fn(params: Any, state: Any, x: Any, y: Any, size: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: _loss(*p, x, y, size))(params)
        loss, grads = dx.get_replica_context().all_reduce("SUM", (loss, grads))
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = case.step(
        lambda params, state, x, y, size: case.strategy.run(
            replica_fn, args=(params, state, x, y, size)
        )
    )
    losses = []
    for x, y in BATCHES * 2:
        params, state, loss = step(params, state, *case.split((x, y)), float(len(x)))
        losses.append(float(loss))
    wanted, expected = _reference("adam")
    close(losses, expected, 1e-4)
    for param, want in zip(params, wanted, strict=True):
        close(case.parts(param), [want] * case.num_replicas, 1e-4)


# What an optimizer refuses.


def test_an_optimizer_wants_a_transformation() -> None:
    with pytest.raises(TypeError, match=r"transformation=0.1 is not an optax transformation"):
        dx.Optimizer(0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1])
def test_accumulation_counts_from_one(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"gradient_accumulation_steps={steps} is less than 1"):
        dx.Optimizer(optax.sgd(0.1), gradient_accumulation_steps=steps)


def test_an_optimizer_keeps_its_variables() -> None:
    first, second = dx.Variable(1.0, name="a"), dx.Variable(1.0, name="b")
    optimizer = dx.Optimizer(optax.sgd(0.1))
    optimizer.apply_gradients([(1.0, first)])
    with pytest.raises(ValueError, match=r"'b' .* is not among .* built for, \['a:0'\]"):
        optimizer.apply_gradients([(1.0, first), (1.0, second)])
    assert float(first) == pytest.approx(0.9)
    with pytest.raises(ValueError, match=r"built for \['a:0'\] but is given \['b:0'\]"):
        optimizer.build([second])


@pytest.mark.parametrize("grads", [[], [None, None]])
def test_an_optimizer_wants_gradients(grads: list[None]) -> None:
    pairs = [(grad, dx.Variable(1.0)) for grad in grads]
    with pytest.raises(ValueError, match=r"apply_gradients: no gradients.*zip\(grads, variables\)"):
        dx.Optimizer(optax.sgd(0.1)).apply_gradients(pairs)


def test_an_optimizer_wants_pairs_in_order() -> None:
    variable = dx.Variable([1.0, 2.0], name="w")
    optimizer = dx.Optimizer(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"the variable of pair 0 is 1.0, not a dx.Variable"):
        optimizer.apply_gradients([(variable, 1.0)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"pair 0 has shape \(3,\).*'w'.*shape \(2,\)"):
        optimizer.apply_gradients([(jnp.ones(3), variable)])
    mirrored = dx.Mirrored([jnp.ones(3)])
    with pytest.raises(ValueError, match=r"pair 0 has shape \(3,\)"):
        optimizer.apply_gradients([(mirrored, variable)])

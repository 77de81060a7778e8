"""Every transformation that optax exports trains as it does without us, or is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.training.optimizer_state import StateLayout, find_owners
from tests.unit.training.optax_cases import CASES, Case, exported_names

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 8, 3)).astype(np.float32)
Y = RANDOM.normal(size=(3, 8)).astype(np.float32)
START = [
    jnp.asarray(value, jnp.float32)
    for value in (RANDOM.normal(size=(3, 2)), RANDOM.normal(size=2), 0.5)
]
NAMES = ("matrix", "vector", "scalar")

COMPILED = (
    "adafactor",
    "contrib.muon",
    "masked",
    "multi_transform",
    "scale_by_backtracking_linesearch",
    "sm3",
)
"""Those whose states, or arguments, differ in kind: compiled, on two replicas."""

ONE_OF_A_KIND = {
    "no state": ("scale", "clip_by_global_norm"),
    "needs parameters": ("stateless_with_tree_map", "adamw", "lamb"),
    "moments": ("adam", "rprop", "scale_by_factored_rms"),
    "one state for all": ("flatten", "contrib.prodigy"),
    "some parameters only": ("selective_transform",),
    "a schedule": ("scale_by_schedule", "inject_hyperparams"),
    "counts steps": ("MultiSteps", "apply_if_finite", "conditionally_mask"),
    "parts with names": ("named_chain", "snapshot"),
    "random numbers": ("add_noise",),
    "extra arguments": ("polyak_sgd", "lbfgs", "contrib.sophia", "contrib.reduce_on_plateau"),
    "keeps parameters": ("contrib.schedule_free", "contrib.sam", "contrib.mechanize"),
    "other shapes": ("contrib.galore", "contrib.split_real_and_imaginary"),
    "refused": ("lookahead", "monitor", "contrib.dpsgd"),
}
"""What `dx.Optimizer` has to cope with, and who needs it; the others do nothing else."""

_IN_SHORT = {name for names in ONE_OF_A_KIND.values() for name in names}


def _loss(params: Sequence[Any], x: Any, y: Any) -> Any:
    """Returns the sum of the examples' losses, over the size of the whole batch."""
    matrix, vector, scalar = [*params, *START[len(params) :]]
    return jnp.sum((jnp.tanh(x @ matrix) @ vector + scalar - y) ** 2) / len(X[0])


_value_and_grad = jax.jit(jax.value_and_grad(_loss))


def _extra_args(case: Case, value: Any, grads: Any, x: Any, y: Any) -> dict[str, Any]:
    def whole_loss(params: Any) -> Any:
        return _loss(params, x, y)

    known = {"value": value, "grad": grads, "value_fn": whole_loss, "obj_fn": whole_loss}
    return {name: known[name] for name in case.needs}


@functools.cache
def _train_with_optax(name: str) -> list[Any]:
    case = CASES[name]
    transformation = optax.with_extra_args_support(case.make())
    params: Any = START[: case.num_params]
    state: Any = transformation.init(params)

    def step(params: Any, state: Any, value: Any, grads: Any, x: Any, y: Any) -> Any:
        extra_args = _extra_args(case, value, grads, x, y)
        updates, state = transformation.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step) if case.has_loops else _one_by_one(step)
    for x, y in zip(X, Y, strict=True):
        params, state = run(params, state, *_value_and_grad(params, x, y), x, y)
    return params


def _one_by_one(step: Callable[..., Any]) -> Callable[..., Any]:
    """Runs operations one by one: each is compiled once, for all transformations."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return step(*args)

    return run


def _create(case: Case, strategy: Any) -> tuple[list[Any], dx.Optimizer]:
    with strategy.scope():
        pairs = zip(NAMES, START[: case.num_params], strict=False)
        return [dx.Variable(v, name=name) for name, v in pairs], dx.Optimizer(case.make())


def _train(case: Case) -> list[Any]:
    variables, optimizer = _create(case, dx.OneDeviceStrategy("CPU:0"))

    def step(value: Any, grads: Any, x: Any, y: Any) -> None:
        extra_args = _extra_args(case, value, grads, x, y)
        optimizer.apply_gradients(zip(grads, variables, strict=True), **extra_args)

    run = dx.function(step) if case.has_loops else _one_by_one(step)
    for x, y in zip(X, Y, strict=True):
        run(*_value_and_grad([v.value() for v in variables], x, y), x, y)
    return variables


def _train_on_replicas(case: Case, strategy: Any) -> list[Any]:
    variables, optimizer = _create(case, strategy)
    in_replica = "value_fn" not in case.needs

    def apply(value: Any, grads: Any, x: Any, y: Any) -> None:
        extra_args = _extra_args(case, value, grads, x, y)
        optimizer.apply_gradients(zip(grads, variables, strict=True), **extra_args)

    def replica_fn(x: Any, y: Any) -> Any:
        value, grads = dx.value_and_grad(
            lambda: _loss([v.value() for v in variables], x, y), variables
        )()
        value = dx.get_replica_context().all_reduce("SUM", value)
        if in_replica:
            apply(value, grads, x, y)
        return value, grads

    @dx.function
    def step(x: Any, y: Any, whole_x: Any, whole_y: Any) -> None:
        value, grads = strategy.run(replica_fn, args=(x, y))
        if not in_replica:
            grads = [strategy.reduce("SUM", grad, axis=None) for grad in grads]
            apply(strategy.reduce("MEAN", value, axis=None), grads, whole_x, whole_y)

    for x, y in zip(X, Y, strict=True):
        step(_split(strategy, x), _split(strategy, y), x, y)
    return variables


def _split(strategy: Any, values: Any) -> Any:
    pieces = np.split(values, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: pieces[context.replica_id_in_sync_group]
    )


def _compare(name: str, strategy: Any, variables: list[Any]) -> None:
    for variable, value in zip(variables, _train_with_optax(name), strict=True):
        for copy in strategy.experimental_local_results(variable):
            np.testing.assert_allclose(copy, value, rtol=1e-4, atol=1e-5, err_msg=variable.name)


@pytest.fixture(scope="module")
def strategy() -> Any:
    return dx.MirroredStrategy(["CPU:0", "CPU:1"])


def test_every_transformation_of_optax_is_known() -> None:
    assert set(exported_names()) - set(CASES) == set()


@pytest.mark.parametrize(
    "name",
    [
        name if name in _IN_SHORT else pytest.param(name, marks=pytest.mark.thorough)
        for name in CASES
    ],
)
def test_it_trains_as_plain_optax(name: str) -> None:
    case = CASES[name]
    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            _train(case)
    else:
        variables = _train(case)
        _compare(name, variables[0].distribute_strategy, variables)


@pytest.mark.parametrize("name", COMPILED)
def test_it_trains_on_replicas_as_plain_optax(strategy: Any, name: str) -> None:
    _compare(name, strategy, _train_on_replicas(CASES[name], strategy))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_function_is_not_passed_in_a_replica(strategy: Any, compiled: bool) -> None:
    with strategy.scope():
        w = dx.Variable(1.0)
        optimizer = dx.Optimizer(optax.contrib.sophia(0.1))

    def replica_fn() -> None:
        optimizer.apply_gradients([(jnp.ones(()), w)], obj_fn=lambda params: params[0] ** 2)

    step = lambda: strategy.run(replica_fn)  # noqa: E731
    with pytest.raises(ValueError, match=r"obj_fn=.* is a function, .* outside the replicas"):
        (dx.function(step) if compiled else step)()


def _scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """A transformation that takes a number by a name of its own."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return [g * -extra_args["rate"] for g in updates], state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_misspelt_argument_is_named(strategy: Any, compiled: bool) -> None:
    with strategy.scope():
        w = dx.Variable(1.0)
        optimizer = dx.Optimizer(optax.chain(optax.adam(0.0), _scale_by_rate()))

    def run(**arguments: Any) -> None:
        apply = lambda: optimizer.apply_gradients([(jnp.ones(()), w)], **arguments)  # noqa: E731
        step = lambda: strategy.run(apply)  # noqa: E731
        (dx.function(step) if compiled else step)()

    with pytest.raises(TypeError, match=r"^apply_gradients: skip_gradient_aggregation: neither .*"):
        run(rate=1.0, skip_gradient_aggregation=True)
    run(rate=jnp.asarray(1.0), value=jnp.asarray(2.0))
    run(rate=0)


def test_a_value_of_one_replica_is_not_passed(strategy: Any) -> None:
    with strategy.scope():
        w = dx.Variable(1.0)
        optimizer = dx.Optimizer(optax.polyak_sgd(0.1))

    def replica_fn() -> None:
        loss = jnp.asarray(dx.get_replica_context().replica_id_in_sync_group, jnp.float32)
        optimizer.apply_gradients([(jnp.ones(()), w)], value=loss)

    with pytest.raises(ValueError, match=r"[Rr]educe"):
        dx.function(lambda: strategy.run(replica_fn))()


# Whose slots they are.

PARAMS = [jnp.ones((3, 2)), jnp.ones(2), jnp.ones(())]


@pytest.mark.parametrize(
    ("transformation", "owners"),
    {
        "none": (optax.identity(), ()),
        "one each": (optax.scale_by_adam(), (None, 0, 1, 2, 0, 1, 2)),
        "not of all": (optax.masked(optax.trace(0.9), [True, False, True]), (0, 2)),
        "by label": (
            optax.partition({"a": optax.trace(0.9), "b": optax.scale_by_adam()}, ["a", "b", "a"]),
            (0, 2, None, 1, 1),
        ),
        "of all together": (optax.flatten(optax.trace(0.9)), (None,)),
        "of other shapes": (
            optax.scale_by_factored_rms(min_dim_size_to_factor=2),
            (None, 0, 1, 2, 0, 1, 2, 0, 1, 2),
        ),
        "wrapped": (
            optax.MultiSteps(optax.trace(0.9), 2).gradient_transformation(),
            (None, None, 0, 1, 2, 0, 1, 2),
        ),
    }.values(),
)
def test_owners_of_slots(transformation: Any, owners: tuple[int | None, ...]) -> None:
    assert find_owners(transformation.init(PARAMS), len(PARAMS)) == owners


def test_several_slots_of_one_item() -> None:
    state = optax.scale_by_sm3().init(PARAMS[:2])
    assert find_owners(state, 2) == (0, 0, 1, 0, 1)


def test_slots_of_parts() -> None:
    """Two parts of the first parameter and none of the second."""
    state = {"b": [("p", "q"), ("r", "s")], "a": "n"}
    state = jax.tree.map(lambda _: np.zeros(()), state)
    layout = StateLayout.describe(state, 2)
    assert layout.owners == (None, 0, 0, 1, 1)
    assert list(layout.list_slots([0, 0])) == [(0, None), (1, 0), (2, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("name", ["adam", "yogi", "rprop", "contrib.prodigy", "MultiSteps"])
def test_owners_are_those_that_optax_finds(name: str) -> None:
    transformation = CASES[name].make()
    state = transformation.init(PARAMS)
    marked = optax.tree.map_params(
        transformation, lambda _, i: i, state, [0, 1, 2], transform_non_params=lambda _: -1
    )
    found = [-1 if owner is None else owner for owner in find_owners(state, 3)]
    assert found == jax.tree.leaves(marked)


@pytest.mark.parametrize("name", ["masked", "multi_transform", "sm3", "contrib.muon"])
def test_a_variable_without_a_gradient_stays_as_it_is(name: str) -> None:
    variables, optimizer = _create(CASES[name], dx.OneDeviceStrategy("CPU:0"))
    optimizer.build(variables)
    before = {v.name: v.numpy() for v in [*variables, *optimizer.variables]}
    optimizer.apply_gradients([(jnp.ones(2), variables[1])])
    for variable in [*variables, *optimizer.variables]:
        if "matrix" in variable.name:
            np.testing.assert_array_equal(variable.numpy(), before[variable.name])
    assert not np.allclose(variables[1].numpy(), before["vector:0"])

"""Updates that run on a server: the same numbers as optax in one process, whole or by rows."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from distribax.parameter_server import (
    Apply,
    Assign,
    OptimizerSpec,
    ParameterClient,
    ParameterServerError,
    ParametersLostError,
    ParameterSpec,
    SparseGradient,
)
from tests.unit.parameter_server.conftest import Cluster

SHAPES = [(400, 50), (50,), ()]
SPECS = [ParameterSpec(f"p{i}", f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
COUNTER = ParameterSpec("n", "iterations", (), "int32", 0)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.01),
    "adagrad": optax.adagrad(0.1),
    "adamw with a schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 100), weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(0.01)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "every second": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


def _values(seed: int, specs: Sequence[ParameterSpec] = SPECS) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=spec.shape), spec.dtype) for spec in specs]


def _register(
    client: ParameterClient,
    transformation: Any,
    specs: Sequence[ParameterSpec] = SPECS,
    values: Sequence[Any] | None = None,
    **settings: Any,
) -> list[ParameterSpec]:
    """Creates the parameters and an optimizer "o" for them; returns the slots."""
    values = _values(0, specs) if values is None else values
    for spec, value in zip(specs, values, strict=True):
        client.create(spec, value)
    leaves = jax.tree.leaves(jax.eval_shape(transformation.init, list(values)))
    slots = [
        ParameterSpec(f"s{i}", f"s{i}", leaf.shape, leaf.dtype.name, 0)
        for i, leaf in enumerate(leaves)
    ]
    uids = tuple(spec.uid for spec in specs), tuple(slot.uid for slot in slots)
    client.register_optimizer(
        0, OptimizerSpec("o", cloudpickle.dumps(transformation), *uids, **settings)
    )
    return slots


@pytest.mark.parametrize("transformation", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_dense_updates_are_those_of_optax(cluster: Cluster, transformation: Any) -> None:
    client = cluster.client()
    client.create(COUNTER, np.int32(0))
    slots = _register(client, transformation, counter="n")
    values = _values(0)
    state = transformation.init(values)
    update = jax.jit(transformation.update)
    for step in range(1, 5):
        gradients = _values(step)
        client.push({0: [Apply("o", tuple(gradients))]})
        updates, state = update(gradients, state, values)
        values = optax.apply_updates(values, updates)
    for served, value in zip(client.pull(SPECS), values, strict=True):
        np.testing.assert_allclose(served, value, rtol=1e-5, atol=1e-6)
    for served, leaf in zip(client.pull(slots), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(served, leaf, rtol=1e-5, atol=1e-6)
    assert client.pull([COUNTER]) == [4]
    assert client.status(0)["updates"] == 4


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("of_gradient", [None, "float32"])
def test_pushes_that_come_again_bring_what_is_in_them_then(
    cluster: Cluster, dtype: str, of_gradient: str | None
) -> None:
    """The server prepares itself for a push that it knows, but not for its contents."""
    spec = ParameterSpec("p", "p", (400, 100), dtype, 0)
    clients = [cluster.client("one"), cluster.client("two")]
    zeros = np.zeros(spec.shape, jnp.dtype(dtype))
    _register(clients[0], optax.sgd(1.0), [spec], [zeros])
    clients[1].create(spec, zeros)
    for number in range(1, 7):
        client = clients[number % 2]
        gradient = np.full(spec.shape, -number, jnp.dtype(of_gradient or dtype))
        client.push({0: [Apply("o", (gradient,))]})
        assert np.all(client.pull([spec])[0] == sum(range(number + 1)))


def test_a_pulled_slot_goes_on_being_updated(any_cluster: Cluster) -> None:
    client = any_cluster.client()
    (slot, *_) = _register(client, optax.sgd(1.0, momentum=1.0), SPECS[:1])
    ones = np.ones(SHAPES[0], np.float32)
    for step in range(1, 4):
        client.push({0: [Apply("o", (ones,))]})
        (trace,) = client.pull([slot])
        assert np.all(trace == step)
    client.push({0: [Assign(slot.uid, 10 * ones), Apply("o", (ones,))]})
    assert np.all(client.pull([slot])[0] == 11)
    np.testing.assert_array_equal(client.pull_rows([(slot, [3])])[0], 11 * ones[:1])


def test_a_parameter_without_a_gradient_keeps_its_value_and_slots(cluster: Cluster) -> None:
    client = cluster.client()
    slots = _register(client, optax.adamw(0.1, weight_decay=0.5))
    old = client.pull([SPECS[1], slots[2]])
    client.push({0: [Apply("o", (_values(1)[0], None, None))]})
    for before, after in zip(old, client.pull([SPECS[1], slots[2]]), strict=True):
        np.testing.assert_array_equal(before, after)
    assert not np.array_equal(client.pull([SPECS[0]])[0], _values(0)[0])
    assert client.pull([slots[0]]) == [1]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adagrad", "clipped"])
def test_sparse_updates_are_those_of_optax_on_the_touched_rows(cluster: Cluster, name: str) -> None:
    transformation = OPTIMIZERS[name]
    client = cluster.client()
    slots = _register(client, transformation)
    indices = np.array([3, 399, 3, 17, 0])
    rows = np.random.default_rng(5).normal(size=(5, 50)).astype(np.float32)
    dense = _values(1)
    client.push({0: [Apply("o", (SparseGradient(indices, rows), dense[1], dense[2]))]})
    # The reference: the same step with the touched rows as the parameter.
    touched = np.unique(indices)
    summed = np.zeros(SHAPES[0], np.float32)
    np.add.at(summed, indices, rows)
    values = _values(0)
    table, values[0] = values[0], values[0][touched]
    state = transformation.init(values)
    update = jax.jit(transformation.update)
    updates, state = update([summed[touched], *dense[1:]], state, values)
    values = optax.apply_updates(values, updates)
    served = client.pull(SPECS)
    expected = table.copy()
    expected[touched] = values[0]
    for one, other in zip(served, [expected, *values[1:]], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for slot, leaf in zip(slots, jax.tree.leaves(state), strict=True):
        (value,) = client.pull([slot])
        part = value[touched] if value.shape == SHAPES[0] else value
        np.testing.assert_allclose(part, leaf, rtol=1e-5, atol=1e-6)


def test_sparse_and_dense_gradients_take_turns(cluster: Cluster) -> None:
    client = cluster.client()
    (slot,) = _register(client, optax.sgd(1.0, momentum=1.0), SPECS[:1], [np.zeros(SHAPES[0])])
    ones = np.ones(SHAPES[0], np.float32)
    client.push({0: [Apply("o", (ones,))]})
    client.push({0: [Apply("o", (SparseGradient([1], ones[:1]),))]})
    client.push({0: [Apply("o", (SparseGradient(np.zeros(0, int), ones[:0]),))]})
    client.push({0: [Apply("o", (ones,))]})
    trace, value = client.pull([slot, SPECS[0]])
    assert trace[0, 0] == 2 and trace[1, 0] == 3
    assert value[0, 0] == -3 and value[1, 0] == -(1 + 2 + 3)


def test_two_updates_of_one_push_follow_each_other(cluster: Cluster) -> None:
    client = cluster.client()
    _register(client, optax.sgd(1.0, momentum=1.0), SPECS[:1], [np.zeros(SHAPES[0])])
    ones = np.ones(SHAPES[0], np.float32)
    rows = SparseGradient([5], ones[:1])
    client.push({0: [Apply("o", (rows,)), Apply("o", (ones,)), Apply("o", (rows,))]})
    (value,) = client.pull(SPECS[:1])
    assert value[0, 0] == -1 and value[5, 0] == -(1 + 2 + 3)


def test_extra_arguments_reach_the_transformation(cluster: Cluster) -> None:
    def update(updates: Any, state: Any, params: Any, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda g: -g * value, updates), state

    transformation = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    client = cluster.client()
    _register(client, transformation, SPECS[1:2], [np.zeros(50)])
    client.push({0: [Apply("o", (np.ones(50),), {"value": 3.0})]})
    assert np.all(client.pull(SPECS[1:2])[0] == -3)


class _Last(NamedTuple):
    gradients: Any
    values: Any


def test_state_that_is_an_input_is_not_overwritten_by_later_pushes(cluster: Cluster) -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return updates, _Last(updates, params)

    transformation = optax.GradientTransformation(
        lambda params: _Last(jax.tree.map(jnp.zeros_like, params), params), update
    )
    client = cluster.client()
    slots = _register(client, transformation, SPECS[:1], [np.zeros(SHAPES[0], np.float32)])
    ones = np.ones(SHAPES[0], np.float32)
    client.push({0: [Apply("o", (ones,))]})
    # Reuses the mailbox, and changes the value, but not the state.
    client.push({0: [Assign("p0", 7 * ones)]})
    last, before = client.pull(slots)
    assert np.all(last == 1) and np.all(before == 0)


def test_parameters_of_64_bits_are_updated_with_64_bits(cluster: Cluster) -> None:
    spec = ParameterSpec("w", "wide", (4,), "float64", 0)
    client = cluster.client()
    _register(client, optax.sgd(1.0), [spec], [np.ones(4)])
    client.push({0: [Apply("o", (np.full(4, 1e-12),))]})
    np.testing.assert_array_equal(client.pull([spec])[0], np.full(4, 1 - 1e-12))


def test_slots_that_exist_are_kept(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(ParameterSpec("s0", "s0", SHAPES[0], "float32", 0), np.full(SHAPES[0], 5.0))
    (slot,) = _register(client, optax.sgd(1.0, momentum=1.0), SPECS[:1])
    assert np.all(client.pull([slot])[0] == 5)


def test_registering_again_changes_nothing(cluster: Cluster) -> None:
    client = cluster.client()
    _register(client, optax.sgd(1.0), SPECS[:1])
    pickled = cloudpickle.dumps(optax.sgd(1.0))
    assert not client.register_optimizer(0, OptimizerSpec("o", pickled, ("p0",)))
    client.create(SPECS[1], np.zeros(50))
    with pytest.raises(ParameterServerError, match="exists with other targets or slots"):
        client.register_optimizer(0, OptimizerSpec("o", pickled, ("p1",)))


def test_wrong_slots_are_refused(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(SPECS[0], _values(0)[0])
    client.create(SPECS[1], _values(0)[1])
    pickled = cloudpickle.dumps(optax.sgd(1.0, momentum=0.9))
    with pytest.raises(ParameterServerError, match="there are 0 of the forms"):
        client.register_optimizer(0, OptimizerSpec("o", pickled, ("p0",)))
    with pytest.raises(ParameterServerError, match=r"\(400, 50\), 'float32'"):
        client.register_optimizer(0, OptimizerSpec("o", pickled, ("p0",), ("p1",)))


def test_a_counter_is_an_integer(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(SPECS[0], _values(0)[0])
    pickled = cloudpickle.dumps(optax.sgd(1.0))
    with pytest.raises(ParameterServerError, match="a scalar of an integer type"):
        client.register_optimizer(0, OptimizerSpec("o", pickled, ("p0",), counter="p0"))
    with pytest.raises(ParametersLostError, match="no parameter 'never'"):
        client.register_optimizer(0, OptimizerSpec("o", pickled, ("p0",), counter="never"))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Apply("o", (None,)), "has 3 targets on this server, but 1 gradients"),
        (Apply("o", (np.zeros(3), None, None)), r"gradient of parameter 'p0' has shape \(3,\)"),
        (Apply("o", (SparseGradient([400], np.zeros((1, 50))), None, None)), "expected 0 to 399"),
        (Apply("o", (SparseGradient([0], np.zeros((2, 50))), None, None)), r"expected \(1, 50\)"),
        (Apply("o", (None, None, SparseGradient([0], np.zeros(1)))), "is a scalar"),
        (Apply("unknown", ()), "there is no optimizer 'unknown'"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(
    cluster: Cluster, operation: Apply, message: str
) -> None:
    client = cluster.client()
    _register(client, optax.sgd(1.0))
    client.push({0: [operation]})
    with pytest.raises((ParameterServerError, ParametersLostError), match=message):
        client.flush()


def test_rows_need_slots_of_the_parameters_shape(cluster: Cluster) -> None:
    client = cluster.client()
    _register(client, optax.scale_by_factored_rms(min_dim_size_to_factor=10), SPECS[:1])
    client.push({0: [Apply("o", (SparseGradient([0], np.ones((1, 50))),))]})
    with pytest.raises(ParameterServerError, match="its rows cannot be updated alone"):
        client.flush()


def test_a_transformation_that_raises_leaves_all_as_it_was(cluster: Cluster) -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        raise ZeroDivisionError("of the user's making")

    client = cluster.client()
    client.create(COUNTER, np.int32(0))
    transformation = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    _register(client, transformation, SPECS[1:2], counter="n")
    client.push({0: [Assign("p1", np.zeros(50)), Apply("o", (np.ones(50),))]})
    with pytest.raises(ParameterServerError, match="of the user's making") as raised:
        client.flush()
    assert raised.value.kind == "ZeroDivisionError"
    value, count = client.pull([SPECS[1], COUNTER])
    np.testing.assert_array_equal(value, _values(0, SPECS[1:2])[0])
    assert count == 0 and client.status(0)["updates"] == 0


def test_an_update_that_is_not_kept_leaves_all_as_it_was(cluster: Cluster) -> None:
    """The first operation of the push has overwritten the optimizer's own copy by then."""

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        raise ZeroDivisionError("of the user's making")

    client = cluster.client()
    _register(client, OPTIMIZERS["momentum"])
    raising = cloudpickle.dumps(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
    client.register_optimizer(0, OptimizerSpec("raising", raising, ("p0",)))
    gradients = tuple(np.ones(shape, np.float32) for shape in SHAPES)
    client.push({0: [Apply("o", gradients)]})
    before = client.pull(SPECS)
    client.push({0: [Apply("o", gradients), Apply("raising", gradients[:1])]})
    with pytest.raises(ParameterServerError, match="of the user's making"):
        client.flush()
    for value, wanted in zip(client.pull(SPECS), before, strict=True):
        np.testing.assert_array_equal(value, wanted)
    client.push({0: [Apply("o", gradients)]})
    for value, wanted in zip(client.pull(SPECS), before, strict=True):
        # Momentum with Nesterov: the second step is 0.1 * (1 + 0.9 * 1.9).
        np.testing.assert_allclose(value, wanted - 0.271, rtol=1e-5, atol=1e-6)


_traces: list[int] = []


def _traced_transformation() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any) -> Any:
        _traces.append(updates[0].shape[0])
        return updates, state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


class _ByReference:
    """Unpickled as a transformation of this module, whose traces can be seen here."""

    def __reduce__(self) -> Any:
        return _traced_transformation, ()


def test_few_programs_are_compiled_for_many_counts_of_rows(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(SPECS[0], _values(0)[0])
    client.register_optimizer(0, OptimizerSpec("o", pickle.dumps(_ByReference()), ("p0",)))
    _traces.clear()
    for count in range(1, 17):
        client.push({0: [Apply("o", (SparseGradient(np.arange(count), np.ones((count, 50))),))]})
    client.flush()
    assert _traces == [1, 2, 4, 8, 16]

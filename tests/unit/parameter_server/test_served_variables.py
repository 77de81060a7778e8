"""Variables on servers and optimizers beside them, without Ray: the servers are threads here."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.execution import named_objects
from distribax.testing import local_servers


@pytest.fixture
def strategy() -> Iterator[Any]:
    """Two servers."""
    with local_servers(2) as strategy:
        yield strategy


def _problem(strategy: Any, transformation: Any) -> tuple[list[Any], Any, Any]:
    with strategy.scope():
        variables = [
            dx.Variable(np.arange(6, dtype=np.float32).reshape(2, 3), name="a"),
            dx.Variable(np.ones(3, np.float32), name="b"),
            dx.Variable(2.0, name="c"),
        ]
        optimizer = dx.Optimizer(transformation)

    def step(x: Any) -> Any:
        def replica(x: Any) -> Any:
            a, b, c = variables
            loss, grads = dx.value_and_grad(
                lambda: jnp.sum((a.value() * x - b.value()) ** 2) + c * c, variables
            )()
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return loss

        return strategy.run(replica, args=(x,))

    return variables, optimizer, step


@pytest.mark.parametrize(
    ("transformation", "compiled"),
    [
        (optax.sgd(0.05), False),
        (optax.adam(0.1), True),
        (optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1), False),
        (optax.chain(optax.clip(0.5), optax.rmsprop(0.01, momentum=0.9)), True),
    ],
    ids=["sgd-eager", "adam-compiled", "adamw-eager", "rmsprop-compiled"],
)
def test_updates_on_two_servers_equal_one_device(
    strategy: Any, transformation: Any, compiled: bool
) -> None:
    states = []
    for where in (strategy, dx.OneDeviceStrategy("CPU:0")):
        variables, optimizer, step = _problem(where, transformation)
        if compiled:
            step = dx.function(step)
        losses = [float(step(jnp.float32(x))) for x in (1.0, 2.0, 3.0)]
        numbers = [variable.numpy() for variable in (*variables, *optimizer.variables)]
        states.append((losses, numbers))
    (losses, numbers), (expected_losses, expected) = states
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for value, wanted in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_slots_live_beside_their_variables(strategy: Any) -> None:
    variables, optimizer, step = _problem(strategy, optax.adam(0.1))
    step(1.0)
    by_name = {variable.name: variable for variable in optimizer.variables}
    for variable in variables:
        slots = [slot for name, slot in by_name.items() if f"/{variable.name[:-2]}/" in name]
        assert len(slots) == 2
        assert {slot.device for slot in slots} == {variable.device}


def test_a_transformation_that_mixes_variables_needs_one_server(strategy: Any) -> None:
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    _, _, step = _problem(strategy, chain)
    with pytest.raises(ValueError, match=r"several servers.*clip_by_global_norm"):
        step(1.0)
    with local_servers(1) as alone:
        _, _, step = _problem(alone, chain)
        assert float(step(1.0)) > 0


def test_a_transformation_with_random_keys_is_refused(strategy: Any) -> None:
    _, _, step = _problem(strategy, optax.noisy_sgd(0.1, eta=0.01, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"random keys.*parameter servers"):
        step(1.0)


def test_a_compiled_step_fetches_only_what_has_changed(strategy: Any) -> None:
    """One without effects, whose values JAX keeps; test_reading_steps.py has the others."""
    with strategy.scope():
        large = dx.Variable(np.ones((1000, 100), np.float32))
        count = dx.Variable(0.0)

    @dx.function
    def step() -> Any:
        return large.value()[0, 0] + count

    for number in range(3):
        count.assign(number)
        assert float(step()) == 1 + number
    source = strategy.source
    versions = dict(source._cached)
    uid = large.placement.specs[0].uid
    step()
    assert source._cached[uid] is versions[uid]


@pytest.mark.parametrize("kind", ["whole", "broadcast", "rows"])
def test_each_call_of_a_step_sends_what_it_has_computed(strategy: Any, kind: str) -> None:
    """How a step's arrays go to the servers is found out once; what is in them is not."""
    rows = kind == "rows"
    with strategy.scope():
        table = dx.Variable(np.zeros((4, 2), np.float32))
        last, total, wide = dx.Variable(np.zeros(2)), dx.Variable(0.0), dx.Variable(np.zeros(3))
        optimizer = dx.Optimizer(optax.sgd(1.0))

    def step(x: Any, row: Any) -> None:
        def loss_of() -> Any:
            picked = dx.embedding_lookup(table, row) if rows else table.value()
            return jnp.sum(picked * x)

        _, gradients = dx.value_and_grad(loss_of, [table])()
        optimizer.apply_gradients(zip(gradients, [table], strict=True))
        last.assign(jnp.stack([x, -x]))
        total.assign_add(x)
        wide.assign_sub(x if kind == "broadcast" else jnp.full(3, x))

    expected, sum_so_far = np.zeros((4, 2), np.float32), 0.0
    compiled = dx.function(lambda x, row: strategy.run(step, args=(x, row)))
    for x, row in [(1.0, 0), (2.0, 3), (4.0, 3), (8.0, 1)]:
        compiled(np.float32(x), np.array([row]))
        expected[row if rows else slice(None)] -= x
        sum_so_far += x
        np.testing.assert_array_equal(np.asarray(table), expected)
        np.testing.assert_array_equal(np.asarray(last), [x, -x])
        np.testing.assert_array_equal(np.asarray(wide), np.full(3, -sum_so_far))
        assert float(total) == sum_so_far
    assert compiled.trace_count == 1
    if rows:
        with pytest.raises(ValueError, match="7"):
            compiled(np.float32(1.0), np.array([7]))


def test_additions_of_two_processes_are_both_kept(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(0.0)

    @dx.function
    def step(x: Any) -> Any:
        # Somebody else's write arrives after this step has fetched its values.
        v.assign_add(x)
        v.assign_add(x)
        return v.read_value()

    step(1.0)
    source, spec = strategy.source, v.placement.specs[0]
    original = source.commit

    def commit(*effects: Any) -> None:
        source.client.push({spec.server: [_add(spec.uid, 100.0)]})
        original(*effects)

    source.commit = commit
    try:
        assert float(step(1.0)) == 4.0
    finally:
        source.commit = original
    assert float(v) == 104.0


def _add(uid: str, value: float) -> Any:
    from distribax.parameter_server import AssignAdd

    return AssignAdd(uid, np.float32(value))


def test_writes_keep_their_order(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(1.0)
        optimizer = dx.Optimizer(optax.sgd(1.0))

    @dx.function
    def step() -> Any:
        v.assign(10.0)
        v.assign_sub(1.0)
        optimizer.apply_gradients([(jnp.float32(2.0), v)])
        v.assign_add(0.5)
        return v.read_value()

    step()
    assert float(v) == 10.0 - 1.0 - 2.0 + 0.5


def test_gradient_accumulation_runs_on_the_server(strategy: Any) -> None:
    with strategy.scope():
        v = dx.Variable(0.0)
        optimizer = dx.Optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)
    for gradient, expected in ((1.0, 0.0), (3.0, -2.0), (1.0, -2.0)):
        optimizer.apply_gradients([(jnp.float32(gradient), v)])
        assert float(v) == expected


def test_two_workers_begin_with_different_variables(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        a, b = dx.Variable(0.0, name="a"), dx.Variable(0.0, name="b")
        optimizer = dx.Optimizer(optax.sgd(1.0))
    with named_objects.pickle_for(strategy):
        elsewhere = cloudpickle.dumps(optimizer)
    optimizer.apply_gradients([(jnp.float32(1.0), a)])
    # As another process would make it that has asked who builds it at the same moment.
    monkeypatch.setattr(strategy.source.client, "get_note", lambda key: None)
    monkeypatch.setattr(named_objects, "_known", weakref.WeakValueDictionary(named_objects._known))
    del named_objects._known[optimizer._uid]
    other = pickle.loads(elsewhere)
    assert other is not optimizer
    with pytest.raises(ValueError, match=r"another worker has built it .* \['b:0'\]"):
        other.apply_gradients([(jnp.float32(1.0), b)])
    assert float(b) == 0.0


def test_synchronous_updates_average_the_contributions() -> None:
    with local_servers(2, contributions=2) as strategy:
        with strategy.scope():
            v = dx.Variable(0.0)
            optimizer = dx.Optimizer(optax.sgd(1.0))
        optimizer.apply_gradients([(jnp.float32(1.0), v)])
        assert int(optimizer.iterations.numpy()) == 0
        optimizer.apply_gradients([(jnp.float32(3.0), v)])
        assert float(v) == -2.0
        assert int(optimizer.iterations.numpy()) == 1


def test_non_slot_devices_need_variables(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"non_slot_devices: var_list is empty"):
        strategy.extended.non_slot_devices([])


def test_nnx_modules_are_refused(strategy: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    @dx.function
    def step(x: Any) -> Any:
        return strategy.run(lambda x: model(x), args=(x,))

    with pytest.raises(NotImplementedError, match=r"flax\.nnx module .* Make a dx\.Variable"):
        step(jnp.ones((1, 3)))


def test_an_optimizer_is_for_variables_of_one_kind() -> None:
    with local_servers() as strategy:
        with strategy.scope():
            served = dx.Variable(1.0, name="served")
        local = dx.Variable(1.0, name="local")
        for variables in ([served, local], [local, served]):
            optimizer = dx.Optimizer(optax.sgd(0.1))
            with pytest.raises(ValueError, match=r"'served'.* lives on .*'local'.* does not live"):
                optimizer.apply_gradients([(1.0, variable) for variable in variables])
        assert float(served) == float(local) == 1.0

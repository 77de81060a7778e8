"""Locality: where broadcast, reduce, update and fetch take values from and put them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.contrib import distribute
from tests.multidevice.tower_api.cases import Case, devices, tower, tower_number

# d.distribute_dataset(dataset).make_one_shot_iterator(): T


def test_iterators_have_locality_t(case: Case) -> None:
    def dataset_fn() -> dx.data.Dataset:
        return dx.data.Dataset.range(2 * case.d.num_towers)

    with case.d.scope():
        dataset = case.d.distribute_dataset(dataset_fn)
        iterator = dataset.make_one_shot_iterator()
        step = case.step(lambda: case.d.call_for_each_tower(lambda x: x * 10, iterator.get_next()))
        for start in (0, case.d.num_towers):
            result = step()
            case.expect(result, distribute.PerDevice, [10.0 * (start + i) for i in case.ids])
        with pytest.raises(StopIteration):
            step()
        # The data set can be iterated again.
        assert [case.unwrap(x)[0] for x in dataset] == [0.0, float(case.d.num_towers)]
    assert len(jax.tree.leaves(dataset.element_spec)) == 1


def test_initializable_iterators_start_again(case: Case) -> None:
    with case.d.scope():
        dataset = case.d.distribute_dataset(dx.data.Dataset.range(case.d.num_towers))
        iterator = dataset.make_initializable_iterator()
        step = case.step(lambda: case.d.call_for_each_tower(lambda x: x + 1, iterator.get_next()))
        with pytest.raises(RuntimeError, match=r"not been initialized.*iterator\.initialize\(\)"):
            step()
        for start in (iterator.initialize, iterator.initializer):
            start()
            case.expect(step(), distribute.PerDevice, case.numbers)
            with pytest.raises(dx.OutOfRangeError):
                step()
        iterator.close()
        with pytest.raises(RuntimeError, match="was closed"):
            step()


def test_initializable_iterators_have_a_position(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        dataset = pair.distribute_dataset(dx.data.Dataset.range(6))
        iterator = dataset.make_initializable_iterator()
        iterator.initialize()
        iterator.get_next()
        state = iterator.get_state()
        other = dataset.make_initializable_iterator()
        other.set_state(state)
        assert [int(x) for x in pair.unwrap(other.get_next())] == [2, 3]
        iterator.close()
        other.close()


def test_batches_stay_on_the_host_if_asked() -> None:
    d = distribute.MirroredStrategy(["CPU:0", "CPU:1"], prefetch_on_device=False)
    with d.scope():
        iterator = d.distribute_dataset(dx.data.Dataset.range(2)).make_one_shot_iterator()
        assert not any(isinstance(x, jax.Array) for x in d.unwrap(iterator.get_next()))
    iterator.close()


# d.broadcast(t): M; d.broadcast(t, v): V(v)


def test_broadcast_is_mirrored_to_the_worker_devices(case: Case) -> None:
    mirrored = case.across(lambda: case.d.broadcast(jnp.asarray(2.0)))
    case.expect(mirrored, distribute.Mirrored, [2.0] * case.d.num_towers)
    if case.wraps:
        assert devices(mirrored) == jax.devices()[: case.d.num_towers]


def test_broadcast_to_a_variable_has_its_locality(case: Case) -> None:
    v = case.variable(1.0)

    def step() -> Any:
        mirrored = case.d.broadcast(jnp.asarray(2.0), v)
        case.d.update(v, lambda v, x: v.assign_add(x), mirrored)
        return mirrored

    mirrored = case.across(step)
    assert float(v) == 3.0
    if not case.compiled and case.kind in ("mirrored", "central"):
        assert tuple(devices(mirrored)) == v.devices


# d.reduce(m, t): M; d.reduce(m, t, v): V(v)


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_reduce_of_t_is_mirrored_to_the_towers(case: Case, method: str) -> None:
    def step() -> Any:
        return case.d.reduce(method, case.d.call_for_each_tower(tower_number))

    total = sum(case.numbers)
    expected = total if method == "sum" else total / case.d.num_towers
    reduced = case.across(step)
    case.expect(reduced, distribute.Mirrored, [expected] * case.d.num_towers)
    if case.wraps:
        assert devices(reduced) == jax.devices()[: case.d.num_towers]


def test_reduce_to_a_variable_has_its_locality(case: Case) -> None:
    v = case.variable(1.0)

    def step() -> Any:
        reduced = case.d.reduce("sum", case.d.call_for_each_tower(tower_number), v)
        case.d.update(v, lambda v, x: v.assign_add(x), reduced)
        return reduced

    reduced = case.across(step)
    assert float(v) == 1.0 + sum(case.numbers)
    if not case.compiled and case.wraps:
        assert tuple(devices(reduced)) == v.devices


def test_reduce_to_named_devices(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        t = pair.call_for_each_tower(tower_number)
        assert devices(pair.reduce("sum", t, "CPU:3")) == [jax.devices()[3]]
        several = pair.reduce("sum", t, ["/device:CPU:1", "/device:CPU:3"])
    assert devices(several) == [jax.devices()[1], jax.devices()[3]]
    assert float(several) == 3.0


def test_batch_reduce_gives_one_value_a_pair(case: Case) -> None:
    a, b = case.variable(0.0, "a"), case.variable(0.0, "b")

    def step() -> Any:
        t = case.d.call_for_each_tower(tower_number)
        ten = case.d.call_for_each_tower(lambda x: x * 10, t)
        to_a, to_b, everywhere = case.d.batch_reduce("sum", [(t, a), (ten, b), [t, None]])
        case.d.update(a, lambda v, x: v.assign(x), to_a)
        case.d.update(b, lambda v, x: v.assign(x), to_b)
        return everywhere

    everywhere = case.across(step)
    total = sum(case.numbers)
    assert (float(a), float(b)) == (total, 10 * total)
    case.expect(everywhere, distribute.Mirrored, [total] * case.d.num_towers)


def test_an_all_reduce_in_the_middle_of_a_tower(case: Case) -> None:
    def tower_fn() -> Any:
        x = tower_number()
        return x - tower().merge_call(lambda distribution, x: distribution.reduce("mean", x), x)

    mean = sum(case.numbers) / case.d.num_towers
    expected = [number - mean for number in case.numbers]
    case.expect(case.towers(tower_fn), distribute.PerDevice, expected)


# d.update(v, fn, ...): V(v)


def test_update_runs_on_every_device_of_the_variable(case: Case) -> None:
    var = case.variable(1.0)
    calls: list[int] = []

    def fn(v: Any, x: Any, *, scale: float) -> Any:
        calls.append(1)
        v.assign_add(x * scale)
        return v

    def step() -> Any:
        return case.d.update(var, fn, case.d.broadcast(jnp.asarray(2.0), var), scale=10.0)

    merged = case.across(step)
    assert merged is var
    copies = len(case.d.parameter_devices)
    assert case.unwrap(var) == [21.0] * copies
    if not case.compiled:
        assert len(calls) == copies


def test_update_gives_a_result_with_the_locality_of_the_variable(case: Case) -> None:
    var = case.variable(1.0)
    result = case.across(lambda: case.d.update(var, lambda v: v + 1))
    assert set(case.unwrap(result)) == {2.0}
    if not case.compiled and case.wraps:
        assert tuple(devices(result)) == var.devices


def test_update_refuses_a_value_that_differs_by_tower(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        v = distribute.get_variable("v", initializer=0.0)
        t = pair.call_for_each_tower(tower_number)
        with pytest.raises(ValueError, match="an argument differs per replica"):
            pair.update(v, lambda v, x: v.assign(x), t)
        with pytest.raises(ValueError, match="an argument differs per replica"):
            pair.update_non_slot(pair.non_slot_devices([v]), lambda x: x, t)
    assert float(v) == 0.0


# d.update_non_slot(d.non_slot_devices(), fn): N


def test_update_non_slot_runs_on_the_non_slot_devices(case: Case) -> None:
    v = case.variable(0.0)
    with case.d.scope():
        places = case.d.non_slot_devices([v])
        with case.d.colocate_vars_with(places):
            beta = distribute.get_variable("beta", initializer=1.0)
    calls: list[int] = []

    def fn(x: Any, *, scale: float) -> None:
        calls.append(1)
        beta.assign(beta * x * scale)

    case.across(lambda: case.d.update_non_slot(places, fn, jnp.asarray(0.5), scale=0.5))
    assert case.unwrap(beta) == [0.25] * len(case.d.parameter_devices)
    if not case.compiled:
        assert len(calls) == len(case.d.parameter_devices)


# d.fetch(t): any locality


def test_fetch_copies_any_locality_to_one_device(case: Case) -> None:
    v = case.variable(3.0)
    host = jax.devices()[0]

    def step() -> Any:
        t = case.d.call_for_each_tower(tower_number)
        return (
            case.d.fetch(t),
            case.d.fetch(case.d.reduce("sum", t)),
            case.d.fetch(v),
            case.d.fetch(case.d.broadcast(jnp.asarray(4.0))),
            case.d.fetch(5.0),
        )

    t, total, variable, mirrored, plain = case.across(step)
    case.expect(t, distribute.PerDevice, case.numbers)
    fetched = [float(x) for x in (total, variable, mirrored, plain)]
    assert fetched == [sum(case.numbers), 3.0, 4.0, 5.0]
    if not case.compiled:
        assert devices(t) == [host] * case.d.num_towers
        assert [devices(x) for x in (total, variable, mirrored, plain)] == [[host]] * 4


def test_fetch_applies_a_function_first(case: Case) -> None:
    v = case.variable([1.0, 2.0])

    def step() -> Any:
        t = case.d.call_for_each_tower(tower_number)
        return case.d.fetch(v, "CPU:2", lambda x: x.sum()), case.d.fetch(t, fn=lambda x: x * 10)

    total, tens = case.across(step)
    assert float(total) == 3.0
    case.expect(tens, distribute.PerDevice, [10.0 * number for number in case.numbers])
    if not case.compiled:
        assert devices(total) == [jax.devices()[2]]


def test_fetch_computes_where_the_value_is(pair: distribute.MirroredStrategy) -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        seen.extend((jnp.zeros(()) + x).devices())
        return x

    with pair.scope():
        pair.fetch(pair.call_for_each_tower(tower_number), "CPU:3", fn)
    assert seen == jax.devices()[:2]


def test_fetch_does_not_copy_what_is_there(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        mirrored = pair.broadcast(jnp.arange(3.0))
        near = pair.fetch(mirrored, "CPU:1")
        far = pair.fetch(mirrored, jax.devices()[2])
    copies = [piece.unsafe_buffer_pointer() for piece in mirrored.values]
    assert near.unsafe_buffer_pointer() == copies[1]
    assert far.unsafe_buffer_pointer() not in copies
    # What was fetched mixes with values of any other device.
    assert np.asarray(near + far).tolist() == [0.0, 2.0, 4.0]


# Values that a step wraps itself.


def test_a_step_may_return_values_that_it_has_wrapped(
    pair: distribute.MirroredStrategy, compiled: bool
) -> None:
    def even(x: Any) -> Any:
        return distribute.PerDevice([x, x + 1]), distribute.Mirrored([x])

    def uneven(x: Any) -> Any:
        return distribute.PerDevice([x, jnp.concatenate([x, x])])

    if compiled:
        even, uneven = dx.function(even), dx.function(uneven)
    with pair.scope():
        different, mirrored = even(jnp.ones(1))
        assert mirrored.numpy().tolist() == [1.0]
        doubled = pair.call_for_each_tower(lambda x: x * 2, different)
        assert [np.asarray(part).tolist() for part in pair.unwrap(doubled)] == [[2.0], [4.0]]
        assert [part.shape for part in pair.unwrap(uneven(jnp.ones(1)))] == [(1,), (2,)]


# The standard pattern for updating variables.


def test_standard_pattern(case: Case) -> None:
    def gradient(v: Any, x: Any) -> Any:
        _, grad = dx.value_and_grad(lambda: jnp.sum(v * v * x), v)()
        return grad

    d = case.d
    by_hand, automatic = case.variable(1.0, "by_hand"), case.variable(1.0, "automatic")
    with d.scope():
        optimizer = dx.Optimizer(optax.sgd(0.01))
        # 1. Wrap your input dataset and create an iterator.
        examples = np.arange(2.0 * d.num_towers, dtype=np.float32)
        dataset = dx.data.Dataset.from_tensor_slices(examples)
        iterator = d.distribute_dataset(lambda: dataset).make_one_shot_iterator()

        def step() -> None:
            x = iterator.get_next()
            # 2. Define each tower up to the point of getting a list of gradient, variable pairs.
            grads_and_vars = d.call_for_each_tower(lambda x: [(gradient(by_hand, x), by_hand)], x)
            # 3. Sum the gradients (with locality T) into values with locality V(v).
            for (_, v), grad in zip(
                grads_and_vars, d.batch_reduce("sum", grads_and_vars), strict=True
            ):
                # 4. Call d.update(v) for each variable to update its value.
                d.update(v, lambda v, g: v.assign_sub(0.01 * g), grad)
            # Steps 3 and 4 are done automatically by an optimizer in a tower context.
            d.call_for_each_tower(
                lambda x: optimizer.apply_gradients([(gradient(automatic, x), automatic)]), x
            )

        run = case.step(step)
        run()
        run()
    iterator.close()
    first, second = examples.reshape(2, -1).sum(axis=1)
    expected = (1 - 0.02 * first) * (1 - 0.02 * second)
    assert float(by_hand) == pytest.approx(expected, rel=1e-6)
    assert float(automatic) == pytest.approx(expected, rel=1e-6)
    assert len(set(case.unwrap(automatic))) == 1

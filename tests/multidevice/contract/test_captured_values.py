"""Distributed values that a step has not been given, but found in a closure or an attribute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, device, replica_number


def _values(case: Case) -> dict[str, Any]:
    """Returns values of each replica from all the places that they come from."""
    dataset = dx.data.Dataset.from_tensor_slices(BATCH).batch(len(BATCH))
    return {
        "made": case.split(BATCH),
        "scalar": case.each(lambda index: jnp.asarray(index + 1.0)),
        "number": case.each(lambda index: index + 1.0),
        "returned": case.run(lambda x: x * 2, case.split(BATCH)),
        "element": next(iter(case.strategy.experimental_distribute_dataset(dataset))),
    }


def _check(case: Case, result: Any, expected: Any) -> None:
    for replica_id, part in enumerate(case.parts(result)):
        close(part, expected(replica_id))


@pytest.mark.parametrize("name", ["made", "scalar", "number", "returned", "element"])
def test_a_value_that_was_found(case: Case, name: str) -> None:
    strategy, value = case.strategy, _values(case)[name]
    pieces = case.parts(value)
    found = SimpleNamespace(inner={"a": [value]})

    def replica_fn(given: Any) -> Any:
        own = found.inner["a"][0]
        total = dx.get_replica_context().all_reduce("SUM", (own, given["x"]))
        return own * 2 + given["x"], jnp.asarray(own) + total[0], total[1] - own, own

    def step() -> Any:
        results = strategy.run(replica_fn, args=({"x": value},))
        local = [part * 1 for part in strategy.experimental_local_results(value)]
        return results, strategy.reduce("SUM", [value], axis=None), local

    compiled = case.step(step)
    for _ in range(2):
        (both, more, less, same), (total,), local = compiled()
        _check(case, same, lambda index: pieces[index])
        _check(case, both, lambda index: pieces[index] * 3)
        _check(case, more, lambda index: pieces[index] + sum(pieces))
        _check(case, less, lambda index: sum(pieces) - pieces[index])
        close(total, sum(pieces))
        close([np.asarray(part) for part in local], [pieces[index] for index in case.replicas])


def test_it_is_used_like_an_array_in_a_replica(case: Case) -> None:
    value, scalar = case.split(BATCH), case.each(lambda index: jnp.asarray(index + 1.0))
    total = case.variable(0.0, aggregation="SUM")
    own = case.variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def replica_fn() -> Any:
        joined = dx.get_replica_context().all_gather(value, axis=0)
        total.assign_add(scalar)
        own.assign_add(scalar)
        gradient = jax.grad(lambda w: (w * value).sum())(2.0)
        later = jnp.sum(jnp.where(value > 3.0, value, 0.0)) + 0 * jnp.sum(value)
        assert (value.shape, value.ndim, len(value)) == (value[:].shape, 1, value[:].size)
        return joined, gradient, value[0] + value.astype(jnp.float32).sum(), later

    joined, gradient, mixed, later = case.run(replica_fn)
    pieces = BATCH.reshape(case.num_replicas, -1)
    n = case.num_replicas
    _check(case, joined, lambda index: BATCH)
    _check(case, gradient, lambda index: pieces[index].sum())
    _check(case, mixed, lambda index: pieces[index][0] + pieces[index].sum())
    _check(case, later, lambda index: pieces[index][pieces[index] > 3].sum())
    assert (float(total), float(own)) == (n * (n + 1) / 2,) * 2


def test_what_the_same_step_has_computed(case: Case) -> None:
    strategy, value = case.strategy, case.split(BATCH)

    def step() -> Any:
        rows, numbers = strategy.run(lambda: (value * 3, replica_number()))

        def merge(strategy: Any) -> Any:
            return strategy.reduce("SUM", (rows, numbers, value), axis=None)

        def replica_fn() -> Any:
            return rows + numbers, dx.get_replica_context().merge_call(merge)

        return strategy.run(replica_fn)

    result, merged = case.across(step)
    pieces, n = BATCH.reshape(case.num_replicas, -1), case.num_replicas
    _check(case, result, lambda index: pieces[index] * 3 + index + 1)
    close(jax.tree.map(np.asarray, merged), (sum(pieces * 3), n * (n + 1) / 2, sum(pieces)))


def test_uneven_pieces_are_found_too(several: Case) -> None:
    value = several.each(lambda index: jnp.full((index + 1,), 2.0))
    run = several.step(lambda: several.strategy.run(lambda: (value * 2).sum()))
    assert several.numbers(run()) == [4.0 * (index + 1) for index in range(several.num_replicas)]


def test_the_part_is_on_the_replicas_device(eager: Case) -> None:
    value = eager.each(lambda index: np.ones(2, np.float32))
    parts = eager.strategy.experimental_local_results(eager.strategy.run(lambda: value + 1))
    assert [next(iter(part.devices())) for part in parts] == [
        device(index) for index in range(len(eager.replicas))
    ]


def test_what_a_step_looked_at_is_as_it_was(several: Case) -> None:
    strategy, values = several.strategy, _values(several)
    before = {name: several.parts(value) for name, value in values.items()}

    @dx.function
    def look() -> Any:
        for value in values.values():
            strategy.experimental_local_results(value)
        return strategy.run(lambda: [value.get() * 1 for value in values.values()])

    for name, result in zip(values, look(), strict=True):
        close(several.parts(result), before[name])
        close(several.parts(values[name]), before[name])
        close(
            several.parts(strategy.run(lambda x: x + 1, args=(values[name],))),
            [part + 1 for part in before[name]],
        )


def test_random_keys_that_were_found_are_taken_out(several: Case) -> None:
    keys = several.each(jax.random.key)
    expected = [jax.random.uniform(jax.random.key(index)) for index in range(several.num_replicas)]
    for _ in range(2):
        result = several.run(lambda: jax.random.uniform(keys.get()))
        close(several.parts(result), expected)
    with pytest.raises(TypeError, match=r"jax.random was given a PerReplica .*keys.get\(\)"):
        several.run(lambda: jax.random.uniform(keys))


def test_random_keys_are_values_too(case: Case) -> None:
    keys = case.each(lambda index: jax.random.key(index))
    result = case.run(lambda key: jax.random.uniform(key), keys)
    _check(case, result, lambda index: jax.random.uniform(jax.random.key(index)))


# Outside the replicas it is no array.


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: np.ones(1) * x,
        lambda x: jnp.ones(1) * x,
        lambda x: x[0],
        lambda x: x.shape,
        lambda x: len(x),
        lambda x: list(x),
        lambda x: bool(x),
        lambda x: x.sum(),
        lambda x: jnp.asarray(x),
    ],
)
def test_outside_the_replicas_it_is_no_array(use: Any) -> None:
    case = Case("mirrored", 2, compiled=False)
    value = case.split(BATCH)
    for context in (case.strategy.scope(), dx.get_strategy().scope()):
        message = r"A PerReplica value was used as an array outside.*strategy.run.*reduce"
        with context, pytest.raises(TypeError, match=message) as raised:
            use(value)
        assert isinstance(raised.value, dx.DistribaxError)


def test_outside_the_replicas_it_can_be_looked_at() -> None:
    value = Case("mirrored", 2, compiled=False).split(BATCH)
    assert f"{value}".startswith("PerReplica:{")
    with pytest.raises(TypeError, match=r"f'\{x:.2f\}': x is a PerReplica value.*reduce"):
        f"{value:.2f}"
    assert not hasattr(value, "shape")
    assert value == value and value != 3.0
    assert len({value, value}) == 1


def test_a_value_of_other_replicas_is_refused(compiled: bool) -> None:
    value = Case("mirrored", 3, compiled).each(lambda index: jnp.asarray(1.0))
    with pytest.raises(ValueError, match=r"(?s)made for 3 replicas.*strategy with 2.*gather"):
        Case("mirrored", 2, compiled).run(lambda: value + 1)


def test_values_that_only_a_later_trace_finds() -> None:
    case = Case("mirrored", 2, compiled=True)
    values = [case.each(lambda index, by=by: jnp.asarray(by * index)) for by in (1.0, 10.0)]
    made: list[dx.Variable] = []
    traces = iter(range(100))

    @dx.function
    def step() -> Any:
        number = min(next(traces), 2)

        def replica() -> Any:
            if not made:
                made.append(dx.Variable(5.0))
                return jnp.zeros(())
            return values[number - 1] + made[0]

        return case.strategy.run(replica)

    assert [float(x) for x in case.strategy.experimental_local_results(step())] == [0.0, 0.0]
    assert [float(x) for x in case.strategy.experimental_local_results(step())] == [5.0, 15.0]


def test_values_that_every_trace_finds_anew() -> None:
    case = Case("mirrored", 2, compiled=True)

    @dx.function
    def step() -> Any:
        value = dx.PerReplica([np.ones(2), np.ones(2)])
        return case.strategy.run(lambda: value + 1)

    with pytest.raises(RuntimeError, match=r"step reads other distributed values.*args=\(x,\)"):
        step()


@pytest.mark.parametrize("by_hand", [False, True], ids=["distributed", "by_hand"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_values_of_any_form_count_in_all_replicas(several: Case, even: bool, by_hand: bool) -> None:
    def make(index: int) -> Any:
        return jnp.full((2 if even else index + 1, 2), index + 1.0)

    strategy = several.strategy
    value = dx.PerReplica(map(make, several.replicas)) if by_hand else several.each(make)
    whole = np.concatenate([np.asarray(make(index)) for index in range(several.num_replicas)])

    def combine(value: Any) -> Any:
        sums = [strategy.run(jnp.sum, args=(value,)), strategy.run(lambda: jnp.sum(value))]
        return (
            strategy.reduce("MEAN", value, axis=0),
            strategy.gather(value, axis=0),
            *(strategy.reduce("SUM", each, axis=None) for each in sums),
        )

    expected = (whole.mean(axis=0), whole, whole.sum(), whole.sum())
    close(several.step(lambda: combine(value))(), expected)
    close(several.step(combine)(value), expected)


def test_values_that_are_returned_as_they_were_found(several: Case) -> None:
    mirrored = several.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(2)))
    uneven = several.each(lambda index: jnp.ones(index + 1))
    for value in (several.each(lambda index: jnp.full(2, index)), mirrored, uneven):
        expected = several.parts(value)
        for _ in range(2):
            close(several.parts(several.step(lambda value=value: value)()), expected)
            close(several.parts(several.run(lambda value=value: value)), expected)


def test_nests_cannot_be_reduced_as_one_value(several: Case) -> None:
    nests = dx.PerReplica([{"a": 1.0} for _ in several.replicas])
    with pytest.raises(TypeError, match=r"reduce: a replica's value is \{'a': 1.0\}.*one by one"):
        several.across(lambda: several.strategy.reduce("SUM", nests, axis=None))

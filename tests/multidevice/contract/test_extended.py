"""`strategy.extended`: reducing to destinations, broadcasting, and updating copies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close, device, replica_number


def _pieces(case: Case, value: Any) -> list[Any]:
    return [np.asarray(part) for part in case.strategy.experimental_local_results(value)]


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_to_a_variables_devices(case: Case, op: str) -> None:
    variable = case.variable([0.0, 0.0])
    n = case.num_replicas
    value = case.each(lambda index: jnp.full((2,), index + 1.0))
    result = case.across(lambda v: case.strategy.extended.reduce_to(op, v, variable), value)
    expected = n * (n + 1) / 2 / (n if op == "MEAN" else 1)
    for piece in _pieces(case, result):
        close(piece, [expected] * 2)


def test_the_result_lies_where_the_variable_lies(several: Case) -> None:
    strategy, variable = several.strategy, several.variable([0.0, 0.0])
    value = several.each(lambda index: jnp.full((2,), index + 1.0))
    result = strategy.extended.reduce_to("SUM", value, variable)
    assert isinstance(result, dx.Mirrored)
    pieces = strategy.experimental_local_results(result)
    assert [next(iter(piece.devices())) for piece in pieces] == list(variable.devices)


@pytest.mark.parametrize("form", ["name", "names", "device"])
def test_reduce_to_named_devices(several: Case, form: str) -> None:
    names = {"name": [device(3)], "names": [device(0), device(6)], "device": [device(2)]}
    devices = names[form]
    destinations = [f"CPU:{jax.local_devices().index(each)}" for each in devices]
    given = {"name": destinations[0], "names": destinations, "device": devices[0]}[form]
    value = several.each(lambda index: jnp.asarray(index + 1.0))
    result = several.strategy.extended.reduce_to("SUM", value, given)
    pieces = several.strategy.experimental_local_results(result)
    n = several.num_replicas
    assert isinstance(result, dx.Mirrored) == (form == "names")
    assert [next(iter(piece.devices())) for piece in pieces] == devices
    assert [float(piece) for piece in pieces] == [n * (n + 1) / 2] * len(devices)


def test_reduce_to_the_places_of_another_value(several: Case) -> None:
    value = several.each(lambda index: jnp.asarray(index + 1.0))
    result = several.strategy.extended.reduce_to("SUM", value, value)
    pieces = several.strategy.experimental_local_results(result)
    assert len(pieces) == len(several.replicas)


def test_destinations_must_name_devices(several: Case) -> None:
    value = several.each(lambda index: jnp.asarray(1.0))
    with pytest.raises(ValueError, match=r"destinations=3 names no device.*'CPU:0'"):
        several.strategy.extended.reduce_to("SUM", value, 3)


def test_batch_reduce_to_keeps_the_order(case: Case) -> None:
    n = case.num_replicas
    first, second = case.variable([0.0, 0.0]), case.variable(0.0)
    a = case.each(lambda index: jnp.full((2,), index + 1.0))
    b = case.each(lambda index: jnp.asarray(index * 10.0))

    def across(a: Any, b: Any) -> Any:
        pairs = [(a, first), (b, second), (a, first)]
        return case.strategy.extended.batch_reduce_to("SUM", pairs)

    results = case.across(across, a, b)
    total = n * (n + 1) / 2
    for result, expected in zip(
        results, [[total] * 2, 10.0 * (total - n), [total] * 2], strict=True
    ):
        for piece in _pieces(case, result):
            close(piece, expected)
    assert case.across(lambda: case.strategy.extended.batch_reduce_to("SUM", [])) == []


def test_options_change_no_result(case: Case) -> None:
    value = case.each(lambda index: jnp.full((3,), index + 1.0))
    options = dx.CommunicationOptions(bytes_per_pack=8, timeout_seconds=30, implementation="ring")

    def across(a: Any) -> Any:
        pairs = [(a, None), (a * 1.0 if case.single else a, None)]
        return case.strategy.extended.batch_reduce_to("SUM", pairs, options)

    n = case.num_replicas
    for result in case.across(across, value):
        for piece in _pieces(case, result):
            close(piece, [n * (n + 1) / 2] * 3)


def test_broadcast_copies_to_all_workers(case: Case) -> None:
    def across(x: Any) -> Any:
        copies = case.strategy.extended.broadcast_to(x)
        return copies, case.strategy.run(lambda y: y + replica_number(), args=(copies,))

    copies, added = case.across(across, jnp.asarray(5.0))
    assert len(_pieces(case, copies)) == (1 if case.single else len(case.replicas))
    close(case.parts(added), [6.0 + index for index in range(case.num_replicas)])


def test_broadcast_copies_to_destinations(several: Case) -> None:
    variable = several.variable(0.0)
    copies = several.strategy.extended.broadcast_to(jnp.asarray(5.0), variable)
    pieces = several.strategy.experimental_local_results(copies)
    assert [next(iter(piece.devices())) for piece in pieces] == list(variable.devices)


def test_broadcast_takes_one_value(several: Case) -> None:
    with pytest.raises(ValueError, match=r"(?s)broadcast_to: tensor=PerReplica.*Pass one array"):
        several.strategy.extended.broadcast_to(several.run(replica_number))


# Updating.


def test_update_runs_once_for_each_copy(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    seen: list[Any] = []

    def update_fn(v: Any, x: Any, *, scale: Any) -> Any:
        seen.append(v)
        return v.assign_add(x * scale).read_value()

    def across(x: Any) -> Any:
        return case.strategy.extended.update(variable, update_fn, args=(x,), kwargs={"scale": 2.0})

    result = case.across(across, jnp.asarray([1.0, 1.0]))
    assert all(v is variable for v in seen)
    assert variable.numpy().tolist() == [3.0, 4.0]
    assert case.numbers(variable) == [[3.0, 4.0]] * case.num_replicas
    for piece in _pieces(case, result):
        assert piece.tolist() == [3.0, 4.0]


def test_an_updates_result_is_mirrored_like_the_variable(case: Case) -> None:
    variable, other = case.variable(1.0), case.variable(10.0)

    def across() -> Any:
        doubled = case.strategy.extended.update(variable, lambda v: v * 2)
        case.strategy.extended.update(other, lambda v, x: v.assign(x + v), args=(doubled,))
        return doubled

    result = case.across(across)
    assert isinstance(result, dx.Mirrored) == (case.mirrors and case.wraps)
    assert float(other) == 12.0


def test_update_without_grouping_returns_a_tuple(case: Case) -> None:
    variable = case.variable(1.0)
    results = case.across(
        lambda: case.strategy.extended.update(variable, lambda v: v * 2, group=False)
    )
    assert isinstance(results, tuple)
    assert [float(result) for result in results] == [2.0] * len(variable.devices)


def test_other_variables_are_the_copy_of_the_same_device(case: Case) -> None:
    shared = case.variable(5.0)
    first, second = (
        case.variable(0.0, synchronization="ON_READ", aggregation="SUM") for _ in range(2)
    )
    case.run(lambda: (first.assign(replica_number()), second.assign(replica_number() * 10)))

    def across() -> Any:
        return case.strategy.extended.update(first, lambda v: v + second + shared, group=False)

    expected = [11.0 * (index + 1) + 5.0 for index in case.replicas]
    assert [float(result) for result in case.across(across)] == expected
    merged = case.run(lambda: dx.get_replica_context().merge_call(lambda strategy: across()))
    local = case.strategy.experimental_local_results
    assert [{float(part) for part in local(result)} for result in merged] == [
        {value} for value in expected
    ]


def test_updates_write_several_variables(case: Case) -> None:
    first, second = case.variable(1.0), case.variable(2.0)

    def update_fn(v: Any) -> None:
        second.assign(second + v)
        v.assign(second * 10.0)

    case.across(lambda: case.strategy.extended.update(first, update_fn))
    assert case.numbers(first) == [30.0] * case.num_replicas
    assert case.numbers(second) == [3.0] * case.num_replicas


def test_update_in_a_replica_meets_the_others(case: Case) -> None:
    variable = case.variable(1.0)

    def replica_fn() -> Any:
        total = dx.get_replica_context().all_reduce("SUM", replica_number())
        return case.strategy.extended.update(
            variable, lambda v, x: v.assign_add(x).read_value(), args=(total,)
        )

    n = case.num_replicas
    result = case.run(replica_fn)
    assert float(variable) == 1.0 + n * (n + 1) / 2
    close(case.parts(result), [1.0 + n * (n + 1) / 2] * n)


def test_an_update_wants_one_value_for_all(several: Case) -> None:
    variable = several.variable(1.0)
    value = several.run(replica_number)
    message = r"(?s)update: an argument differs per replica.*reduce_to"
    with pytest.raises(ValueError, match=message):
        several.across(
            lambda v: several.strategy.extended.update(variable, lambda v, x: None, args=(v,)),
            value,
        )
    with pytest.raises(ValueError, match=message):
        several.strategy.extended.update_non_slot(["CPU:0"], lambda x: None, args=(value,))


def test_an_update_wants_a_variable_of_its_strategy(pair: Any) -> None:
    outside = dx.Variable(1.0, name="outside")
    for thing, named in ((outside, "variable 'outside'"), (3, "3")):
        with pytest.raises(ValueError, match=rf"update: {named}.*not a variable that was created"):
            pair.extended.update(thing, lambda v: None)


def test_non_slot_variables_are_updated_together(case: Case) -> None:
    strategy, extended = case.strategy, case.strategy.extended
    slot = case.variable(1.0)
    with strategy.scope():
        devices = extended.non_slot_devices([slot])
        with extended.colocate_vars_with(devices):
            beta = dx.Variable(0.5)

    def across(x: Any) -> Any:
        return extended.update_non_slot(
            devices, lambda x: beta.assign(beta * x).read_value(), args=(x,)
        )

    result = case.across(across, jnp.asarray(4.0))
    assert float(beta) == 2.0
    for piece in _pieces(case, result):
        close(piece, 2.0)
    ungrouped = case.across(
        lambda: extended.update_non_slot(devices, lambda: 1.0, kwargs={}, group=False)
    )
    assert ungrouped == (1.0,) * len(beta.devices)

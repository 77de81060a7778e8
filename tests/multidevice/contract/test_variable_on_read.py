"""Variables of which each replica has its own value, combined when they are read outside."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, replica_number

COMBINED = {
    "SUM": lambda numbers: sum(numbers),
    "MEAN": lambda numbers: sum(numbers) / len(numbers),
    "ONLY_FIRST_REPLICA": lambda numbers: numbers[0],
}


def _variable(case: Case, value: Any, aggregation: str) -> dx.Variable:
    return case.variable(value, synchronization="ON_READ", aggregation=aggregation)


def test_each_replica_has_its_own_value(case: Case) -> None:
    variables = [_variable(case, 1.0, aggregation) for aggregation in (*COMBINED, "NONE")]

    def change(variable: dx.Variable) -> Any:
        before = variable.read_value()
        variable.assign(replica_number())
        variable.assign_add(10.0)
        variable.assign_sub(replica_number() * 2)
        return before, variable.read_value()

    results = case.run(lambda: [change(variable) for variable in variables])
    own = [10.0 - (index + 1.0) for index in range(case.num_replicas)]
    for variable, (before, after) in zip(variables, results, strict=True):
        assert case.numbers(before) == [1.0] * case.num_replicas
        assert case.numbers(after) == own
        assert case.numbers(variable) == own
    again = case.run(lambda: variables[-1].read_value())
    assert case.numbers(again) == own


def test_reading_outside_combines(case: Case) -> None:
    variables = {name: _variable(case, [1.0, 2.0], name) for name in COMBINED}
    n = case.num_replicas
    for name, variable in variables.items():
        combine = COMBINED[name]
        assert variable.numpy().tolist() == [combine([1.0] * n), combine([2.0] * n)]

    def across() -> Any:
        before = [variable.read_value() for variable in variables.values()]
        for variable in variables.values():
            case.strategy.run(lambda v=variable: v.assign(jnp.stack([replica_number()] * 2)))
        return before, [variable.read_value() for variable in variables.values()]

    results = zip(variables.items(), *case.across(across), strict=True)
    for (name, variable), before, after in results:
        combine = COMBINED[name]
        assert np.asarray(before).tolist() == [combine([1.0] * n), combine([2.0] * n)]
        combined = combine([index + 1.0 for index in range(n)])
        assert np.asarray(after).tolist() == [combined] * 2
        assert variable.numpy().tolist() == [combined] * 2


def test_reading_in_a_merge_combines(case: Case) -> None:
    variables = {name: _variable(case, 0.0, name) for name in COMBINED}

    def read(variable: dx.Variable) -> Any:
        variable.assign(replica_number())
        context = dx.get_replica_context()
        return context.merge_call(lambda strategy: variable.read_value()), variable.read_value()

    numbers = [index + 1.0 for index in range(case.num_replicas)]
    results = case.run(lambda: {name: read(variable) for name, variable in variables.items()})
    for name, (combined, own) in results.items():
        assert case.numbers(combined) == [COMBINED[name](numbers)] * case.num_replicas
        assert case.numbers(own) == numbers


def test_without_aggregation_there_is_no_one_value(several: Case) -> None:
    variable = _variable(several, 1.0, "NONE")
    for read in (lambda: variable.read_value(), lambda: variable + 1.0):
        with pytest.raises(ValueError, match=r"ON_READ with aggregation=NONE.*local_results"):
            several.across(read)
    with pytest.raises(ValueError, match=r"ON_READ with aggregation=NONE"):
        several.run(lambda: dx.get_replica_context().merge_call(lambda s: variable.read_value()))


def test_assigning_outside_spreads_a_sum(case: Case) -> None:
    variable = _variable(case, [0.0, 0.0], "SUM")
    case.across(lambda: variable.assign([12.0, 24.0]))
    n = case.num_replicas
    assert case.numbers(variable) == [[12.0 / n, 24.0 / n]] * n
    assert variable.numpy().tolist() == [12.0, 24.0]


def test_assigning_outside_sets_every_replica(case: Case) -> None:
    names = ("MEAN", "ONLY_FIRST_REPLICA", "NONE")
    variables = [_variable(case, 1.0, name) for name in names]

    def across() -> None:
        for variable in variables:
            variable.assign(5.0).assign_add(2.0).assign_sub(1.0)

    case.across(across)
    for variable in variables:
        assert case.numbers(variable) == [6.0] * case.num_replicas


@pytest.mark.parametrize("how", ["assign_add", "assign_sub"])
def test_adding_outside_to_a_sum_is_refused(several: Case, how: str) -> None:
    variable = _variable(several, 1.0, "SUM")
    with pytest.raises(ValueError, match=rf"{how}: .*ON_READ with aggregation=SUM.*use assign\(\)"):
        several.across(lambda: getattr(variable, how)(1.0))


@pytest.mark.parametrize("kind", ["default", "one_device"])
def test_one_device_has_ordinary_variables(kind: str, compiled: bool) -> None:
    case = Case(kind, 1, compiled)
    for aggregation in (*COMBINED, "NONE"):
        variable = _variable(case, 1.0, aggregation)
        case.across(lambda v=variable: v.assign_add(2.0).assign_sub(0.5))
        assert float(variable) == 2.5


def test_assigning_in_a_merge(case: Case) -> None:
    variable = _variable(case, 1.0, "SUM")

    def replica_fn() -> Any:
        variable.assign(replica_number())
        dx.get_replica_context().merge_call(lambda strategy: variable.assign(12.0))
        variable.assign_add(replica_number())
        return variable.read_value()

    n = case.num_replicas
    assert case.numbers(case.run(replica_fn)) == [12.0 / n + index + 1.0 for index in range(n)]


def test_integers_are_summed_as_integers(case: Case) -> None:
    variable = _variable(case, 0, "SUM")
    case.run(lambda: variable.assign_add(jnp.asarray(2)))
    assert (int(variable), variable.read_value().dtype) == (2 * case.num_replicas, jnp.int32)


def test_updates_reach_every_copy(case: Case) -> None:
    variable = _variable(case, [1.0, 1.0], "SUM")
    value = case.each(lambda index: jnp.full((2,), index + 1.0))

    def across(value: Any) -> Any:
        return case.strategy.extended.update(
            variable, lambda v, x: v.assign_add(x).read_value(), args=(value,)
        )

    result = case.across(across, value)
    expected = [[index + 2.0] * 2 for index in range(case.num_replicas)]
    assert case.numbers(variable) == expected
    assert case.numbers(result) == expected


def test_it_is_not_trainable_by_default(case: Case) -> None:
    assert _variable(case, 1.0, "SUM").trainable is False
    assert case.variable(1.0, trainable=True, synchronization="ON_READ").trainable is True


def test_it_keeps_its_values_from_step_to_step(case: Case) -> None:
    variable = _variable(case, 0.0, "SUM")
    step = case.step(lambda: case.strategy.run(lambda: variable.assign_add(replica_number())))
    for _ in range(3):
        step()
    assert case.numbers(variable) == [3.0 * (index + 1) for index in range(case.num_replicas)]


def test_reducing_and_gathering_a_variable(case: Case) -> None:
    variable = _variable(case, [0.0, 0.0], "SUM")
    case.run(lambda: variable.assign(jnp.stack([replica_number(), replica_number()])))

    def across() -> Any:
        strategy = case.strategy
        return strategy.reduce("SUM", variable, axis=None), strategy.gather(variable, axis=0)

    total, joined = case.across(across)
    numbers = [index + 1.0 for index in range(case.num_replicas)]
    assert np.asarray(total).tolist() == [sum(numbers)] * 2
    assert joined.tolist() == [number for number in numbers for _ in range(2)]


def test_copies_of_a_variable_are_variables(mirrored: Case) -> None:
    total = mirrored.variable(np.zeros(2, np.float32), synchronization="ON_READ", aggregation="SUM")
    twin = copy.deepcopy(total)
    for _ in range(2):
        mirrored.run(lambda: twin.assign_add(jnp.ones(2)))
    assert (twin.numpy() == 2 * mirrored.num_replicas).all() and not total.numpy().any()


def test_truth_values_stay_truth_values(mirrored: Case) -> None:
    seen = mirrored.variable(np.zeros(2, bool), synchronization="ON_READ", aggregation="SUM")

    def step() -> Any:
        seen.assign(jnp.asarray([True, False]))
        return dx.get_replica_context().merge_call(lambda strategy: seen.read_value())

    found = mirrored.parts(mirrored.run(step))[0]
    assert found.dtype == bool and found.tolist() == seen.numpy().tolist() == [True, False]

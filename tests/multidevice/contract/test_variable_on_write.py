"""Variables whose copies are kept the same: what replicas write is aggregated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, device, replica_number
from tests.multidevice.contract.other_workers import TOGETHER

HOWS = {
    "assign": lambda old, x: x,
    "assign_add": lambda old, x: old + x,
    "assign_sub": lambda old, x: old - x,
}
AGGREGATIONS = {
    "SUM": lambda numbers: sum(numbers),
    "MEAN": lambda numbers: sum(numbers) / len(numbers),
    "ONLY_FIRST_REPLICA": lambda numbers: numbers[0],
}


def _numbers(case: Case) -> list[float]:
    return [index + 1.0 for index in range(case.num_replicas)]


def test_replicas_write_together(case: Case) -> None:
    kinds = [(aggregation, how) for aggregation in AGGREGATIONS for how in HOWS]
    variables = {kind: case.variable(10.0, aggregation=kind[0]) for kind in kinds}

    def replica_fn() -> Any:
        for (_, how), variable in variables.items():
            getattr(variable, how)(replica_number())
        return [variable.read_value() for variable in variables.values()]

    seen = case.run(replica_fn)
    for read, ((aggregation, how), variable) in zip(seen, variables.items(), strict=True):
        expected = HOWS[how](10.0, AGGREGATIONS[aggregation](_numbers(case)))
        assert case.numbers(variable) == [expected] * case.num_replicas
        assert case.numbers(read) == [expected] * case.num_replicas
        assert float(variable) == expected


def test_writes_without_aggregation_are_refused(case: Case) -> None:
    variable = case.variable(10.0, name="kernel")
    if case.single:
        case.run(lambda: variable.assign(replica_number()))
        assert float(variable) == 1.0
        return
    with pytest.raises(ValueError, match=r"variable 'kernel'.*created at .*aggregation=NONE.*MEAN"):
        case.run(lambda: variable.assign(replica_number()))
    assert float(variable) == 10.0


def test_a_python_number_is_taken_as_it_is(case: Case) -> None:
    mean, first = (
        case.variable(1.0, aggregation=aggregation)
        for aggregation in ("MEAN", "ONLY_FIRST_REPLICA")
    )

    def replica_fn() -> None:
        mean.assign_add(2.0)
        first.assign(5)

    case.run(replica_fn)
    assert (float(mean), float(first)) == (3.0, 5.0)


def test_a_python_number_has_no_sum(case: Case) -> None:
    variable = case.variable(1.0, aggregation="SUM")
    if case.single:
        case.run(lambda: variable.assign(2.0))
        assert float(variable) == 2.0
        return
    with pytest.raises(ValueError, match=r"assign: .*SUM .*Python number 2.0.*jnp.asarray\(2.0\)"):
        case.run(lambda: variable.assign(2.0))


def test_a_shared_array_has_no_sum(several: Case) -> None:
    total, mean = (several.variable(1.0, aggregation=name) for name in ("SUM", "MEAN"))
    shared = jnp.asarray(2.0)
    several.run(mean.assign, shared)
    assert float(mean) == 2.0
    writes = [total.assign_add, lambda x: total.assign(shared)]
    if TOGETHER and not several.compiled:
        # What a replica has of its worker alone may be another array in the next worker.
        writes.pop()
    for write in writes:
        with pytest.raises(ValueError, match=r"SUM .*one array that all replicas share.*MEAN"):
            several.run(write, shared)
    several.run(lambda x: total.assign(x + 0), shared)
    assert float(total) == 2.0 * several.num_replicas


def test_integers_and_truth_values_aggregate(case: Case) -> None:
    n = case.num_replicas
    count = case.variable(0, aggregation="SUM")
    flag = case.variable(False, aggregation="ONLY_FIRST_REPLICA")

    def replica_fn() -> None:
        index = jnp.asarray(dx.get_replica_context().replica_id_in_sync_group)
        count.assign_add(index + 1)
        flag.assign(index == 0)

    case.run(replica_fn)
    assert (int(count), count.dtype) == (n * (n + 1) // 2, jnp.int32)
    assert bool(flag) is True


def test_reads_see_earlier_writes_of_the_same_step(case: Case) -> None:
    variable = case.variable(1.0, aggregation="MEAN")

    def replica_fn() -> Any:
        before = variable.read_value()
        variable.assign(before * 2)
        between = variable + 0.0
        variable.assign_add(jnp.asarray(1.0))
        return before, between, variable.read_value()

    seen = case.run(replica_fn)
    n = case.num_replicas
    assert [case.numbers(value) for value in seen] == [[1.0] * n, [2.0] * n, [3.0] * n]


def test_all_copies_change_together(case: Case) -> None:
    variable = case.variable([1.0, 2.0], aggregation="SUM")
    case.run(lambda: variable.assign(jnp.stack([replica_number(), replica_number() * 2])))
    total = sum(_numbers(case))
    copies = case.strategy.experimental_local_results(variable)
    assert [np.asarray(copy).tolist() for copy in copies] == [[total, total * 2]] * len(copies)
    assert len(copies) == len(variable.devices)


def test_writes_outside_the_replicas(case: Case) -> None:
    variables = {how: case.variable([10.0, 20.0]) for how in HOWS}

    def across() -> Any:
        return {how: getattr(v, how)([1.0, 2.0]).read_value() for how, v in variables.items()}

    for how, value in case.across(across).items():
        expected = [HOWS[how](10.0, 1.0), HOWS[how](20.0, 2.0)]
        assert np.asarray(value).tolist() == expected
        assert variables[how].numpy().tolist() == expected
        assert case.numbers(variables[how]) == [expected] * case.num_replicas


def test_a_write_takes_anything_that_is_an_array(case: Case) -> None:
    variable, other = case.variable([0.0, 0.0]), case.variable([7.0, 8.0])
    mirrored = case.run(lambda: dx.get_replica_context().all_reduce("MEAN", jnp.ones(2)))
    values = [[1, 2], (3.0, 4.0), np.asarray([5.0, 6.0]), jnp.ones(2), other, mirrored]
    results = case.across(lambda: [variable.assign(value).read_value() for value in values])
    for result, value in zip(results, values, strict=True):
        assert np.asarray(result).tolist() == np.asarray(value).tolist()


def test_a_scalar_is_added_to_every_element(case: Case) -> None:
    variable = case.variable([1.0, 2.0], aggregation="MEAN")
    case.across(lambda: variable.assign_add(1.0))
    assert variable.numpy().tolist() == [2.0, 3.0]


def test_a_per_replica_value_is_not_written_outside(several: Case) -> None:
    variable = several.variable(0.0)
    value = several.run(replica_number)
    with pytest.raises(ValueError, match=r"assign: the value differs per replica.*reduce"):
        several.across(variable.assign, value)


def test_a_value_must_have_the_shape(small: Case) -> None:
    case = small
    variable = case.variable([1.0, 2.0], name="bias", aggregation="SUM")
    message = (
        r"assign: a value of shape \(3,\).*variable 'bias' \(shape \(2,\).*Expected shape \(2,\)"
    )
    with pytest.raises(ValueError, match=message):
        case.across(lambda: variable.assign(jnp.zeros(3)))
    with pytest.raises(ValueError, match=message):
        case.run(lambda: variable.assign(jnp.zeros(3)))
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_a_value_must_fit_the_data_type(small: Case) -> None:
    case = small
    variable = case.variable(3, name="count", aggregation="SUM")
    with pytest.raises(
        ValueError, match=r"float32 does not fit variable 'count'.*astype\('int32'\)"
    ):
        case.across(lambda: variable.assign(jnp.asarray(0.5)))
    with pytest.raises(ValueError, match=r"float32 does not fit"):
        case.across(lambda: variable.assign(0.5))
    case.across(lambda: variable.assign(4.0))
    assert int(variable) == 4


def test_replicas_write_their_own_strategys_variables_only(scoped: Case) -> None:
    outside = dx.Variable(1.0, name="outside")
    if scoped.single:
        scoped.run(lambda: outside.assign(2.0))
        assert float(outside) == 2.0
        return
    with pytest.raises(ValueError, match=r"'outside'.*not created under the strategy.*scope\(\)"):
        scoped.run(lambda: outside.assign(replica_number()))


def test_replicas_read_variables_from_anywhere(scoped: Case) -> None:
    outside = dx.Variable([1.0, 2.0])
    with dx.OneDeviceStrategy(device(3)).scope():
        elsewhere = dx.Variable([10.0, 20.0])
    result = scoped.run(lambda: outside + elsewhere + replica_number())
    n = scoped.num_replicas
    assert scoped.numbers(result) == [[12.0 + index, 23.0 + index] for index in range(n)]


def test_a_variable_outlives_many_steps(case: Case) -> None:
    variable = case.variable(0.0, aggregation="MEAN")
    step = case.step(lambda: case.strategy.run(lambda: variable.assign_add(replica_number())))
    for _ in range(4):
        step()
    n = case.num_replicas
    assert float(variable) == pytest.approx(4 * (n + 1) / 2)


def test_a_reduced_value_is_assigned_outside(case: Case) -> None:
    variable = case.variable(0.0)

    def across() -> Any:
        numbers = case.strategy.run(replica_number)
        return variable.assign(case.strategy.reduce("SUM", numbers, axis=None)).read_value()

    assert float(case.across(across)) == sum(_numbers(case))
    assert float(variable) == sum(_numbers(case))


def test_values_that_are_no_numbers_for_it(any_strategy: Any) -> None:
    refused = [
        ("abc", "value 'abc' for variable 'w'.*not an array of numbers"),
        (None, "value None for variable 'w'.*not an array of numbers"),
        ([[1], [2, 3]], "not an array of numbers"),
        (jax.random.key(0), "variable 'w'.*array of random keys.*key_data"),
        (float("nan"), "float32 does not fit variable 'w'.*int32"),
        (float("inf"), "float32 does not fit variable 'w'.*int32"),
    ]
    with any_strategy.scope():
        variable = dx.Variable([1, 2], name="w")
        for value, message in refused:

            def write(value: Any = value) -> None:
                variable.assign(value)

            for run in (write, dx.function(write)):
                with pytest.raises(ValueError, match=message):
                    run()
        assert variable.numpy().tolist() == [1, 2]

"""Meeting the other replicas: `merge_call`, what it is given and what it gives back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, replica_number


def _merge(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return dx.get_replica_context().merge_call(fn, args=args, kwargs=kwargs)


def test_the_merge_function_gets_all_replicas_values(case: Case) -> None:
    def merge_fn(strategy: Any, three_plus_id: Any) -> Any:
        return sum(strategy.experimental_local_results(three_plus_id))

    def replica_fn(three: Any) -> Any:
        value = three + dx.get_replica_context().replica_id_in_sync_group
        return _merge(merge_fn, value) + value

    merged = case.run(replica_fn, 3)
    # The worker's own ones: the others have a merge function of their own.
    own = [3 + index for index in case.replicas]
    parts = case.strategy.experimental_local_results(merged)
    assert [int(part) for part in parts] == [sum(own) + number for number in own]


def test_nests_and_keyword_arguments_are_merged_leaf_by_leaf(case: Case) -> None:
    n = case.num_replicas

    def merge_fn(strategy: Any, pair: Any, *, scale: Any, text: str) -> Any:
        assert text == "same"
        first, second = (strategy.reduce("SUM", leaf, axis=None) for leaf in pair)
        return {"sums": (first, second), "scaled": strategy.reduce("MEAN", scale["by"], axis=None)}

    def replica_fn() -> Any:
        number = replica_number()
        return _merge(merge_fn, (number, number * 2), scale={"by": number * 10}, text="same")

    result = case.run(replica_fn)
    total = n * (n + 1) / 2
    close(case.parts(result["sums"][0]), [total] * n)
    close(case.parts(result["sums"][1]), [total * 2] * n)
    close(case.parts(result["scaled"]), [total * 10 / n] * n)


def test_each_replica_gets_its_part_of_the_result(case: Case) -> None:
    per_replica = case.each(lambda index: jnp.asarray(index * 10.0))

    def replica_fn(given: Any) -> Any:
        own, shared, nothing, nest = _merge(
            lambda strategy, x: (x, jnp.asarray(5.0), None, {"x": [x]}), given
        )
        assert nothing is None
        return own + shared, nest["x"][0]

    added, own = case.run(replica_fn, per_replica)
    assert case.numbers(added) == [index * 10.0 + 5.0 for index in range(case.num_replicas)]
    assert case.numbers(own) == [index * 10.0 for index in range(case.num_replicas)]


def test_a_mirrored_result_is_the_same_in_every_replica(case: Case) -> None:
    def merge_fn(strategy: Any, x: Any) -> Any:
        return strategy.extended.reduce_to("SUM", x, x if isinstance(x, dx.PerReplica) else None)

    result = case.run(lambda: _merge(merge_fn, replica_number()) + replica_number())
    n = case.num_replicas
    assert case.numbers(result) == [n * (n + 1) / 2 + index + 1 for index in range(n)]


def test_one_object_from_all_replicas_arrives_as_itself(case: Case) -> None:
    token = object()
    seen: list[Any] = []
    case.run(lambda: _merge(lambda strategy, *args: seen.append(args), token, "text", 7, None))
    assert set(seen) == {(token, "text", 7, None)}


def test_values_that_differ_arrive_wrapped(case: Case) -> None:
    seen: list[Any] = []
    case.run(lambda: _merge(lambda strategy, x: seen.append(type(x)), replica_number()))
    assert {issubclass(kind, dx.PerReplica) for kind in seen} == {case.wraps}


def test_a_variable_arrives_as_the_variable(case: Case) -> None:
    variable = case.variable(1.0)
    seen: list[Any] = []
    result = case.run(lambda: _merge(lambda strategy, v: (seen.append(v), v)[1], variable))
    assert all(v is variable for v in seen)
    assert result is variable


def test_replicas_meet_as_often_as_they_like(case: Case) -> None:
    def replica_fn() -> Any:
        value = replica_number()
        for _ in range(3):
            total = _merge(lambda strategy, x: strategy.reduce("SUM", x, axis=None), value)
            value = total * 1.0
        return value

    n = case.num_replicas
    assert case.numbers(case.run(replica_fn)) == [n * (n + 1) / 2 * n * n] * n


def test_one_value_of_a_merge_is_no_value_of_each_replica(several: Case) -> None:
    def replica_fn() -> Any:
        total = _merge(lambda strategy, x: strategy.reduce("SUM", x, axis=None), replica_number())
        _merge(lambda strategy, x: strategy.reduce("MEAN", x, axis=None), total)
        return total

    total = several.run(replica_fn)
    assert isinstance(total, jax.Array)
    with pytest.raises(ValueError, match=r"one value that all \d replicas share"):
        several.strategy.reduce("SUM", total, axis=None)


def test_the_merge_function_may_run_replicas_again(case: Case) -> None:
    def inner(x: Any) -> Any:
        return x * 100 + replica_number()

    def merge_fn(strategy: Any, x: Any) -> Any:
        again = strategy.run(inner, args=(x,))
        return again, strategy.reduce("SUM", again, axis=None)

    again, total = case.run(lambda: _merge(merge_fn, replica_number()))
    expected = [(index + 1) * 101.0 for index in range(case.num_replicas)]
    assert case.numbers(again) == expected
    assert case.numbers(total) == [sum(expected)] * case.num_replicas


def test_variables_are_written_and_updated_in_a_merge(case: Case) -> None:
    assigned, updated = case.variable(0.0), case.variable(1.0)

    def merge_fn(strategy: Any, x: Any) -> Any:
        total = strategy.extended.reduce_to("SUM", x, updated)
        strategy.extended.update(updated, lambda v, t: v.assign_add(t), args=(total,))
        assigned.assign(strategy.reduce("SUM", x, axis=None))
        return assigned.read_value()

    result = case.run(lambda: _merge(merge_fn, replica_number()))
    n = case.num_replicas
    total = n * (n + 1) / 2
    assert case.numbers(result) == [total] * n
    assert case.numbers(assigned) == [total] * n
    assert case.numbers(updated) == [total + 1] * n


def test_reducing_along_an_axis_in_a_merge(case: Case) -> None:
    def merge_fn(strategy: Any, x: Any) -> Any:
        sums = strategy.reduce("SUM", x, axis=0), strategy.reduce("MEAN", x, axis=0)
        return *sums, strategy.gather(x, axis=0)

    total, mean, joined = case.run(lambda x: _merge(merge_fn, x), case.split(BATCH))
    for value, expected in ((total, BATCH.sum()), (mean, BATCH.mean()), (joined, BATCH)):
        close(case.parts(value), [expected] * case.num_replicas)


def test_variables_are_reduced_and_gathered_in_a_merge(case: Case) -> None:
    n = case.num_replicas
    mirrored = case.variable([1.0, 2.0])
    own = case.variable([0.0, 0.0], synchronization="ON_READ", aggregation="SUM")
    scalar = case.variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def merge_fn(strategy: Any) -> Any:
        return (
            strategy.reduce("MEAN", mirrored, axis=None),
            strategy.reduce("SUM", own, axis=None),
            strategy.reduce("SUM", scalar, axis=None),
            strategy.gather(own, axis=0),
        )

    def replica_fn() -> Any:
        own.assign(jnp.stack([replica_number()] * 2))
        scalar.assign(replica_number())
        return _merge(merge_fn)

    total = n * (n + 1) / 2
    expected = [[1.0, 2.0], [total] * 2, total, [i + 1.0 for i in range(n) for _ in range(2)]]
    for value, want in zip(case.run(replica_fn), expected, strict=True):
        close(case.parts(value), [want] * n)
    outside = case.across(lambda: case.strategy.reduce("SUM", scalar, axis=None))
    close(outside, total)


def test_a_merge_returns_a_value_from_outside(case: Case) -> None:
    """A distributed value that the merge function closes over is taken apart too."""
    value = case.each(lambda index: jnp.asarray(index * 10.0))
    result = case.run(lambda: _merge(lambda strategy: value) + replica_number())
    close(case.parts(result), [index * 11.0 + 1.0 for index in range(case.num_replicas)])


def test_call_for_each_replica_is_the_low_level_run(case: Case) -> None:
    doubled = case.across(
        lambda x: case.strategy.extended.call_for_each_replica(
            lambda x, *, by: x * by, args=(x,), kwargs={"by": 2}
        ),
        case.each(lambda index: jnp.asarray(float(index))),
    )
    assert case.numbers(doubled) == [index * 2.0 for index in range(case.num_replicas)]


def test_a_merge_function_must_be_callable(small: Case) -> None:
    with pytest.raises(TypeError, match=r"merge_call: merge_fn=3 is not callable.*strategy first"):
        small.run(lambda: dx.get_replica_context().merge_call(3))


def test_the_default_replica_can_merge_too() -> None:
    merged = dx.get_replica_context().merge_call(
        lambda strategy, x, *, y: (strategy is dx.get_strategy(), x + y), (1,), {"y": 2}
    )
    assert merged == (True, 3)


def test_replicas_that_ask_for_different_reductions() -> None:
    eager = Case("mirrored", 2, compiled=False)

    def reduce() -> Any:
        own = dx.get_replica_context()
        op = "SUM" if own.replica_id_in_sync_group == 0 else "MEAN"
        return own.all_reduce(op, jnp.ones(()))

    with pytest.raises(RuntimeError, match=r"different calls, \['all_reduce\(SUM\)'.*\(MEAN\)"):
        eager.run(reduce)


def test_partial_functions_are_merged(several: Case) -> None:
    def add(number: float, strategy: Any, x: Any) -> Any:
        return strategy.reduce("SUM", x, axis=None) + number

    def replica() -> Any:
        return dx.get_replica_context().merge_call(functools.partial(add, 1.0), args=(own(),))

    def own() -> Any:
        return replica_number() * 2

    total = several.num_replicas * (several.num_replicas + 1)
    assert several.numbers(several.run(replica)) == [total + 1.0] * several.num_replicas

"""`reduce` and `gather`: many values become one, with the right denominator."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, replica_number

MATRIX = np.arange(24, dtype=np.float32).reshape(12, 2)
UNEVEN = np.arange(7, dtype=np.float32)
"""Splits in 7; 4, 3; 3, 3, 1; and 2, 2, 2, 1."""


def _reduce(case: Case, op: Any, value: Any, axis: int | None) -> Any:
    return case.across(lambda v: case.strategy.reduce(op, v, axis=axis), value)


@pytest.mark.parametrize("op", ["SUM", "sum", "Mean", dx.ReduceOp.SUM, dx.ReduceOp.MEAN])
def test_scalars(case: Case, op: Any) -> None:
    numbers = case.run(replica_number)
    n = case.num_replicas
    total = n * (n + 1) / 2
    expected = total if "SUM" in str(op).upper() else total / n
    close(_reduce(case, op, numbers, None), expected)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_across_replicas_alone(case: Case, op: str) -> None:
    n = case.num_replicas
    pieces = MATRIX.reshape(n, 12 // n, 2)
    expected = pieces.sum(axis=0) / (n if op == "MEAN" else 1)
    close(_reduce(case, op, case.split(MATRIX), None), expected)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [0, -2])
def test_across_the_batch(case: Case, op: str, axis: int) -> None:
    expected = MATRIX.sum(axis=0) if op == "SUM" else MATRIX.mean(axis=0)
    close(_reduce(case, op, case.split(MATRIX), axis), expected)


@pytest.mark.parametrize("axis", [1, -1])
def test_across_another_dimension(case: Case, axis: int) -> None:
    n = case.num_replicas
    expected = MATRIX.reshape(n, 12 // n, 2).mean(axis=(0, 2))
    close(_reduce(case, "MEAN", case.split(MATRIX), axis), expected)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_vectors_become_scalars(case: Case, op: str) -> None:
    expected = BATCH.sum() if op == "SUM" else BATCH.mean()
    result = _reduce(case, op, case.split(BATCH), 0)
    assert result.shape == ()
    close(result, expected)


def test_uneven_pieces_have_the_right_denominator(case: Case) -> None:
    uneven = case.split(UNEVEN)
    close(_reduce(case, "SUM", uneven, 0), UNEVEN.sum())
    close(_reduce(case, "MEAN", uneven, 0), UNEVEN.mean())


def test_six_and_not_eight() -> None:
    """A batch of 6 in pieces of 4 and 2: the mean divides by 6."""
    for compiled in (False, True):
        case = Case("mirrored", 2, compiled)
        pieces = [jnp.asarray([0.0, 1.0, 2.0, 3.0]), jnp.asarray([4.0, 5.0])]
        value = case.each(lambda index, pieces=pieces: pieces[index])
        close(_reduce(case, "MEAN", value, 0), 15.0 / 6.0)


def test_empty_pieces_count_nothing(several: Case) -> None:
    value = several.each(lambda index: jnp.full((0 if index else 3,), 2.0))
    close(_reduce(several, "MEAN", value, 0), 2.0)
    close(_reduce(several, "SUM", value, 0), 6.0)
    seen = several.run(lambda x: jnp.sum(x) + 1.0, value)
    assert several.numbers(seen) == [7.0] + [1.0] * (several.num_replicas - 1)


def test_uneven_pieces_need_an_axis(several: Case) -> None:
    with pytest.raises(ValueError, match=r"different shapes.*partial batch.*axis=0"):
        _reduce(several, "SUM", several.split(UNEVEN), None)


@pytest.mark.parametrize("axis", [None, 0])
def test_the_mean_of_integers_is_a_true_division(case: Case, axis: int | None) -> None:
    value = case.each(lambda index: jnp.asarray([index + 1]))
    n = case.num_replicas
    result = _reduce(case, "MEAN", value, axis)
    assert jnp.issubdtype(result.dtype, jnp.floating) or n == 1
    close(jnp.ravel(jnp.asarray(result)), [(n + 1) / 2])
    total = _reduce(case, "SUM", value, axis)
    assert total.dtype == jnp.int32


def test_nests_are_reduced_leaf_by_leaf(case: Case) -> None:
    value = case.split({"a": BATCH, "b": (BATCH * 2, [MATRIX])})
    result = _reduce(case, "SUM", value, 0)
    close(result["a"], BATCH.sum())
    close(result["b"][0], BATCH.sum() * 2)
    close(result["b"][1][0], MATRIX.sum(axis=0))


def test_one_value_for_all_has_a_mean_and_no_sum(case: Case) -> None:
    shared = jnp.asarray([1.0, 2.0])
    close(case.strategy.reduce("MEAN", shared, axis=None), [1.0, 2.0])
    close(case.strategy.reduce("MEAN", shared, axis=0), 1.5)
    assert case.strategy.reduce("SUM", 0, axis=None) == 0
    if case.num_replicas == 1:
        close(case.strategy.reduce("SUM", shared, axis=None), [1.0, 2.0])
        return
    for axis in (None, 0):
        with pytest.raises(ValueError, match=r"one value that all \d replicas share.*MEAN"):
            case.strategy.reduce("SUM", shared, axis=axis)


def test_a_mirrored_value_is_one_for_each_replica(case: Case) -> None:
    n = case.num_replicas
    mirrored = case.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(2)))
    close(_reduce(case, "SUM", mirrored, None), [n * n] * 2)
    close(_reduce(case, "MEAN", mirrored, None), [n] * 2)
    close(_reduce(case, "MEAN", mirrored, 0), n)


def test_variables_are_reduced(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    copies = case.num_replicas if case.kind == "mirrored" else 1
    close(_reduce(case, "MEAN", variable, None), [1.0, 2.0])
    close(_reduce(case, "SUM", variable, None), [copies, 2.0 * copies])


@pytest.mark.parametrize("axis", [1, -2, True, 1.0, "0"])
def test_an_axis_must_fit(case: Case, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"reduce: axis=.* does not fit a value of shape \(\d+,\)"):
        _reduce(case, "SUM", case.split(BATCH), axis)
    with pytest.raises(ValueError, match=r"reduce: axis=.* does not fit a value of shape \(2,\)"):
        case.strategy.reduce("MEAN", jnp.ones(2), axis=axis)


def test_a_scalar_has_no_axis(case: Case) -> None:
    with pytest.raises(ValueError, match=r"axis=0 does not fit.*\(\).*use axis=None"):
        _reduce(case, "SUM", case.run(replica_number), 0)


@pytest.mark.parametrize("op", ["max", None, 3])
def test_the_reduction_must_be_known(strategy: Any, op: Any) -> None:
    with pytest.raises(ValueError, match=rf"reduce_op={op!r} is not a ReduceOp.*ReduceOp.SUM"):
        strategy.reduce(op, 1.0, axis=None)


# Gathering.


def _gather(case: Case, value: Any, axis: Any) -> Any:
    return case.across(lambda v: case.strategy.gather(v, axis=axis), value)


@pytest.mark.parametrize("axis", [0, -1])
def test_gather_joins_the_pieces(case: Case, axis: int) -> None:
    close(_gather(case, case.split(BATCH), axis), BATCH)


@pytest.mark.parametrize("axis", [1, -1])
def test_gather_along_another_dimension(case: Case, axis: int) -> None:
    n = case.num_replicas
    value = case.each(lambda index: jnp.full((2, 1), float(index)))
    close(_gather(case, value, axis), [list(range(n))] * 2)


def test_gather_joins_uneven_pieces(case: Case) -> None:
    close(_gather(case, case.split(UNEVEN), 0), UNEVEN)


def test_gather_takes_nests(case: Case) -> None:
    result = _gather(case, case.split({"a": BATCH, "b": [MATRIX]}), 0)
    close(result, {"a": BATCH, "b": [MATRIX]})


def test_gather_joins_the_copies_of_a_variable(case: Case) -> None:
    variable = case.variable([[1], [2]])
    copies = case.num_replicas if case.kind == "mirrored" else 1
    close(_gather(case, variable, 0), [[1], [2]] * copies)


@pytest.mark.parametrize("axis", [1, -2, True, None])
def test_gather_wants_an_axis_that_fits(case: Case, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"gather: axis=.* does not fit values of shape"):
        _gather(case, case.split(BATCH), axis)


def test_gather_wants_no_scalars(case: Case) -> None:
    with pytest.raises(ValueError, match=r"gather: axis=0 .*scalars have no axis"):
        _gather(case, case.run(replica_number), 0)


def test_gather_wants_the_other_dimensions_to_agree(several: Case) -> None:
    value = several.each(lambda index: jnp.zeros((1, index + 1)))
    with pytest.raises(ValueError, match=r"gather: .*differ in more than axis=0"):
        _gather(several, value, 0)


def test_gather_wants_values_of_replicas(several: Case) -> None:
    with pytest.raises(ValueError, match=r"gather: .*one value that all replicas share"):
        _gather(several, jnp.ones(2), 0)

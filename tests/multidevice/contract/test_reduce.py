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


def _both(case: Case, value: Any, *axes: int | None) -> list[Any]:
    """Returns the sums and the means of a value along each of some axes."""
    reduce = case.strategy.reduce
    return case.across(
        lambda v: [(reduce("SUM", v, axis=axis), reduce("MEAN", v, axis=axis)) for axis in axes],
        value,
    )


def test_scalars(case: Case) -> None:
    n = case.num_replicas
    ((total, mean),) = _both(case, case.run(replica_number), None)
    close((total, mean), (n * (n + 1) / 2, (n + 1) / 2))


@pytest.mark.parametrize("op", ["SUM", "sum", "Sum", dx.ReduceOp.SUM, dx.VariableAggregation.SUM])
def test_reductions_are_named(pair: Any, op: Any) -> None:
    n = pair.num_replicas_in_sync
    assert float(pair.reduce(op, pair.run(replica_number), axis=None)) == n * (n + 1) / 2


def test_across_replicas_and_dimensions(case: Case) -> None:
    n = case.num_replicas
    pieces = MATRIX.reshape(n, 12 // n, 2)
    alone, batch, also_batch, other = _both(case, case.split(MATRIX), None, 0, -2, 1)
    close(alone, (pieces.sum(axis=0), pieces.mean(axis=0)))
    close(batch, (MATRIX.sum(axis=0), MATRIX.mean(axis=0)))
    close(also_batch, batch)
    close(other, (pieces.sum(axis=(0, 2)), pieces.mean(axis=(0, 2))))


@pytest.mark.parametrize(("dtype", "most"), [("float16", 40_000), ("int8", 100), ("int32", 2**30)])
def test_means_are_of_sums_that_fit(case: Case, dtype: str, most: Any) -> None:
    n, most = case.num_replicas, np.asarray(most, dtype)
    value = case.each(lambda _: jnp.full((2,), most))
    ((_, alone), (_, batch)) = _both(case, value, None, 0)
    shared = case.run(lambda x: dx.get_replica_context().all_reduce("MEAN", x), value)
    close([alone, batch, *case.parts(shared)], [[most] * 2, most, *[[most] * 2] * n])
    if dtype == "float16":
        assert alone.dtype == batch.dtype == case.parts(shared)[0].dtype == dtype


def test_vectors_become_scalars(case: Case) -> None:
    ((total, mean),) = _both(case, case.split(BATCH), 0)
    assert total.shape == mean.shape == ()
    close((total, mean), (BATCH.sum(), BATCH.mean()))


def test_uneven_pieces_have_the_right_denominator(case: Case) -> None:
    close(_both(case, case.split(UNEVEN), 0), [(UNEVEN.sum(), UNEVEN.mean())])


def test_six_and_not_eight() -> None:
    """A batch of 6 in pieces of 4 and 2: the mean divides by 6."""
    for compiled in (False, True):
        case = Case("mirrored", 2, compiled)
        pieces = [jnp.asarray([0.0, 1.0, 2.0, 3.0]), jnp.asarray([4.0, 5.0])]
        value = case.each(lambda index, pieces=pieces: pieces[index])
        close(_reduce(case, "MEAN", value, 0), 15.0 / 6.0)


def test_empty_pieces_count_nothing(several: Case) -> None:
    value = several.each(lambda index: jnp.full((0 if index else 3,), 2.0))
    close(_both(several, value, 0), [(6.0, 2.0)])
    seen = several.run(lambda x: jnp.sum(x) + 1.0, value)
    assert several.numbers(seen) == [7.0] + [1.0] * (several.num_replicas - 1)


def test_uneven_pieces_need_an_axis(several: Case) -> None:
    with pytest.raises(ValueError, match=r"different shapes.*partial batch.*axis=0"):
        _reduce(several, "SUM", several.split(UNEVEN), None)


def test_the_mean_of_integers_is_a_true_division(case: Case) -> None:
    n = case.num_replicas
    for total, mean in _both(case, case.each(lambda index: jnp.asarray([index + 1])), None, 0):
        assert total.dtype == jnp.int32
        close(jnp.ravel(jnp.asarray(mean)), [(n + 1) / 2])


def test_nests_are_reduced_leaf_by_leaf(case: Case) -> None:
    value = case.split({"a": BATCH, "b": (BATCH * 2, [MATRIX])})
    result = _reduce(case, "SUM", value, 0)
    close(result["a"], BATCH.sum())
    close(result["b"][0], BATCH.sum() * 2)
    close(result["b"][1][0], MATRIX.sum(axis=0))


def test_one_value_for_all_has_a_mean_and_no_sum(case: Case) -> None:
    shared = jnp.asarray([1.0, 2.0])
    close(case.strategy.reduce("MEAN", shared, axis=None), [1.0, 2.0])
    close(case.strategy.reduce("MEAN", shared, axis=np.int64(0)), 1.5)
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
    alone, batch = _both(case, mirrored, None, 0)
    close(alone, ([n * n] * 2, [n] * 2))
    close(batch, (2 * n * n, n))


def test_variables_are_reduced(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    copies = case.num_replicas if case.mirrors else 1
    close(_both(case, variable, None), [([copies, 2.0 * copies], [1.0, 2.0])])


@pytest.mark.parametrize("axis", [1, -2, True, 1.0, "0"])
def test_an_axis_must_fit(small: Case, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"reduce: axis=.* does not fit a value of shape \(\d+,\)"):
        _reduce(small, "SUM", small.split(BATCH), axis)
    with pytest.raises(ValueError, match=r"reduce: axis=.* does not fit a value of shape \(2,\)"):
        small.strategy.reduce("MEAN", jnp.ones(2), axis=axis)


def test_a_scalar_has_no_axis(small: Case) -> None:
    with pytest.raises(ValueError, match=r"axis=0 does not fit.*\(\).*use axis=None"):
        _reduce(small, "SUM", small.run(replica_number), 0)


@pytest.mark.parametrize("op", ["max", None, 3])
def test_the_reduction_must_be_known(pair: Any, op: Any) -> None:
    with pytest.raises(ValueError, match=rf"reduce_op={op!r} is not a ReduceOp.*ReduceOp.SUM"):
        pair.reduce(op, 1.0, axis=None)


# Gathering.


def _gather(case: Case, value: Any, axis: Any) -> Any:
    return case.across(lambda v: case.strategy.gather(v, axis=axis), value)


def test_gather_joins_the_pieces_of_a_nest(case: Case) -> None:
    result = _gather(case, case.split({"a": BATCH, "b": [MATRIX]}), 0)
    close(result, {"a": BATCH, "b": [MATRIX]})


@pytest.mark.parametrize("axis", [1, np.int64(-1)])
def test_gather_along_another_dimension(case: Case, axis: int) -> None:
    n = case.num_replicas
    value = case.each(lambda index: jnp.full((2, 1), float(index)))
    close(_gather(case, value, axis), [list(range(n))] * 2)


def test_gather_joins_uneven_pieces(case: Case) -> None:
    close(_gather(case, case.split(UNEVEN), 0), UNEVEN)


def test_gather_joins_the_copies_of_a_variable(case: Case) -> None:
    variable = case.variable([[1], [2]])
    copies = case.num_replicas if case.mirrors else 1
    close(_gather(case, variable, 0), [[1], [2]] * copies)


@pytest.mark.parametrize("axis", [1, -2, True, None])
def test_gather_wants_an_axis_that_fits(small: Case, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"gather: axis=.* does not fit values of shape"):
        _gather(small, small.split(BATCH), axis)


def test_gather_wants_no_scalars(small: Case) -> None:
    with pytest.raises(ValueError, match=r"gather: axis=0 .*scalars have no axis"):
        _gather(small, small.run(replica_number), 0)


def test_gather_wants_the_other_dimensions_to_agree(several: Case) -> None:
    value = several.each(lambda index: jnp.zeros((1, index + 1)))
    with pytest.raises(ValueError, match=r"gather: .*differ in more than axis=0"):
        _gather(several, value, 0)


def test_gather_wants_values_of_replicas(several: Case) -> None:
    with pytest.raises(ValueError, match=r"gather: .*one value that all replicas share"):
        _gather(several, jnp.ones(2), 0)

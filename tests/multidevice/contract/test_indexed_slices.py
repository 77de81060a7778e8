"""`dx.IndexedSlices` over replicas: rows are combined by their numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close, make_strategy, replica_number

SHAPE = (5, 2)
ROWS = jnp.asarray([1, 4])


def _make() -> dx.IndexedSlices:
    """Returns rows 1 and 4 of a table, of which all replicas have the same numbers."""
    return dx.IndexedSlices(jnp.ones((2, 2)) * replica_number(), ROWS, SHAPE)


def _total(case: Case) -> np.ndarray:
    """Returns the sum of all replicas' rows, as the whole table."""
    table = np.zeros(SHAPE, np.float32)
    table[[1, 4]] = case.num_replicas * (case.num_replicas + 1) / 2
    return table


def _check(result: Any, expected: np.ndarray) -> None:
    assert isinstance(result, dx.IndexedSlices)
    assert np.issubdtype(np.asarray(result.indices).dtype, np.integer)
    close(np.asarray(jnp.asarray(result)), expected)


def test_in_a_replica(case: Case) -> None:
    def replica_fn() -> Any:
        context = dx.get_replica_context()
        nest = {"rows": _make(), "dense": replica_number()}
        joined = context.all_reduce("SUM", nest), context.all_reduce("MEAN", _make())
        with pytest.raises(NotImplementedError, match=r"all_gather: a dx.IndexedSlices cannot be"):
            context.all_gather(nest, axis=0)
        return joined

    result = case.run(replica_fn)
    assert isinstance(result[1].values, dx.Mirrored) == case.wraps
    n = case.num_replicas
    for total, mean in case.strategy.experimental_local_results(result):
        _check(total["rows"], _total(case))
        _check(mean, _total(case) / n)
        close(total["dense"], n * (n + 1) / 2)


def test_outside_the_replicas(case: Case) -> None:
    strategy, reduce = case.strategy, case.strategy.reduce

    def step() -> Any:
        slices = strategy.run(_make)
        with pytest.raises(NotImplementedError, match=r"gather: a dx.IndexedSlices cannot be"):
            strategy.gather([slices], axis=0)
        by_op = reduce("SUM", {"a": slices}, axis=None)["a"], reduce("MEAN", slices, axis=None)
        return slices, by_op, reduce("SUM", slices, axis=0), reduce("MEAN", slices, axis=(0, 1))

    own, (total, mean), along, everything = case.across(step)
    n, expected = case.num_replicas, _total(case)
    _check(total, expected)
    _check(mean, expected / n)
    close((along, everything), (expected.sum(axis=0), expected.mean() / n))
    parts = strategy.experimental_local_results(own)
    for index, part in zip(case.replicas, parts, strict=True):
        _check(part, np.where(expected, index + 1.0, 0.0))
    # What was returned can be given again.
    again = case.run(lambda x: dx.IndexedSlices(x.values * 2, x.indices, x.dense_shape), own)
    _check(reduce("SUM", again, axis=None), 2 * expected)


def test_in_a_merge_function(case: Case) -> None:
    variable = case.variable(np.zeros(SHAPE, np.float32))

    def merge(strategy: Any, slices: Any) -> Any:
        extended = strategy.extended
        total = extended.reduce_to("SUM", slices, variable)
        extended.update(variable, lambda v, g: v.scatter_add(g), args=(total,))
        (mean,) = extended.batch_reduce_to("MEAN", [(slices, "CPU:0")])
        return total, mean

    def replica_fn() -> Any:
        return dx.get_replica_context().merge_call(merge, args=(_make(),))

    result = case.run(replica_fn)
    for total, mean in case.strategy.experimental_local_results(result):
        _check(total, _total(case))
        _check(mean, _total(case) / case.num_replicas)
    close(variable, _total(case))


def test_replicas_may_have_different_numbers_of_rows(eager: Case) -> None:
    def replica_fn() -> Any:
        count = int(dx.get_replica_context().replica_id_in_sync_group) + 1
        slices = dx.IndexedSlices(jnp.ones((count, 2)), jnp.arange(count), SHAPE)
        return slices, dx.get_replica_context().all_reduce("SUM", slices)

    slices, reduced = eager.run(replica_fn)
    n = eager.num_replicas
    expected = [[n - row] * 2 if row < n else [0, 0] for row in range(SHAPE[0])]
    _check(eager.strategy.reduce("SUM", slices, axis=None), np.asarray(expected))
    _check(reduced, np.asarray(expected))


def test_rows_that_all_replicas_share(several: Case) -> None:
    """New slices of each replica count for each, one object of all is one value."""
    values, one = jnp.ones((2, 2)), dx.IndexedSlices(jnp.ones((1, 2)), jnp.asarray([3]), SHAPE)
    made = several.run(lambda: dx.IndexedSlices(values, ROWS, SHAPE))
    total = several.strategy.reduce("SUM", made, axis=None)
    n = several.num_replicas
    _check(total, np.where(_total(several), float(n), 0.0))
    with pytest.raises(ValueError, match=r"reduce: .* is one value that all"):
        several.strategy.reduce("SUM", one, axis=None)
    assert several.strategy.reduce("MEAN", one, axis=None) is one
    mixed = dx.IndexedSlices(several.each(lambda index: jnp.ones((2, 2))), ROWS, SHAPE)
    _check(several.strategy.reduce("MEAN", mixed, axis=None), np.where(_total(several), 1.0, 0.0))


@pytest.mark.parametrize("ops", [dx.AllReduce, dx.ReductionToOneDevice])
def test_algorithms_combine_rows(ops: Any) -> None:
    case = Case("mirrored", 2, compiled=False)
    slices, by_hand = case.run(_make), [_make_alone(index) for index in range(2)]
    for given in (slices, dx.PerReplica(by_hand)):
        plain = ops().reduce("SUM", given, "CPU:1")
        assert not isinstance(plain.values, dx.Mirrored)
        _check(plain, _total(case))
        dense, copies = ops().batch_reduce(
            "MEAN", [(case.run(replica_number), "CPU:0"), (given, ["CPU:0", "CPU:1"])]
        )
        close(dense, 1.5)
        assert len(copies.values.values) == 2
        _check(copies, _total(case) / 2)
        with pytest.raises(NotImplementedError, match=r"gather: a dx.IndexedSlices"):
            ops().gather(given, None, axis=0)


def _make_alone(index: int) -> dx.IndexedSlices:
    return dx.IndexedSlices(jnp.ones((2, 2)) * (index + 1.0), ROWS, SHAPE)


def test_replicas_return_rows_or_none_do() -> None:
    strategy = make_strategy("mirrored", 2)
    with pytest.raises(ValueError, match=r"results of different structure"):
        strategy.run(lambda: _make() if replica_number() == 1.0 else jnp.ones(2))

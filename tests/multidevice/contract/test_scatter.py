"""Rows that replicas write: those of all of them, as the variable's aggregation says."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close, replica_number

VALUE = np.arange(8, dtype=np.float32).reshape(4, 2) + 1


def _apply(name: str, rows: list[float]) -> np.ndarray:
    """Returns the value after each of the rows was written to row 1."""
    value = VALUE.copy()
    for row in rows:
        match name:
            case "add" | "nd_add":
                value[1] += row
            case "sub":
                value[1] -= row
            case "mul":
                value[1] *= row
            case "div":
                value[1] /= row
            case "max":
                value[1] = np.maximum(value[1], row)
            case "update":
                value[1] = row
    return value


def _write(variable: Any, name: str, row: Any) -> None:
    if name == "nd_add":
        variable.scatter_nd_add([[1, 0], [1, 1]], jnp.full(2, row))
    else:
        slices = dx.IndexedSlices(jnp.full((1, 2), row), jnp.array([1]))
        getattr(variable, f"scatter_{name}")(slices)


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_rows_of_all_replicas(case: Case, aggregation: str) -> None:
    first = aggregation == "ONLY_FIRST_REPLICA"
    combined = ["add", "sub", "mul", "div", "nd_add"]
    names = [*combined, "max", "update"] if first else combined
    with case.strategy.scope():
        variables = {name: dx.Variable(VALUE, aggregation=aggregation) for name in names}
        refused = dx.Variable(VALUE, aggregation=aggregation)

    def replica_fn() -> Any:
        for name, variable in variables.items():
            _write(variable, name, replica_number() + 1)
        if not first and not case.single:
            with pytest.raises(NotImplementedError, match=f"scatter_update.*{aggregation}"):
                _write(refused, "update", 1.0)
        return variables["add"].read_value()

    case.run(replica_fn)
    rows = [float(number + 2) for number in range(case.num_replicas)]
    if aggregation == "MEAN":
        rows = [row / case.num_replicas for row in rows]
    for name, variable in variables.items():
        close(variable, _apply(name, rows[:1] if first else rows))


def test_each_replica_has_rows_of_its_own(case: Case) -> None:
    with case.strategy.scope():
        table = dx.Variable(np.zeros((5, 1), np.float32), aggregation="SUM")
        own = dx.Variable(VALUE, synchronization="ON_READ", aggregation="SUM")

    def replica_fn() -> None:
        number = replica_number()
        index = jnp.reshape(number, (1,)).astype(int)
        table.scatter_add(dx.IndexedSlices(jnp.reshape(number, (1, 1)), index))
        _write(own, "max", 10 * number)

    case.run(replica_fn)
    n = case.num_replicas
    close(table, np.where(np.arange(5) <= n, np.arange(5), 0.0)[:, None])
    expected = VALUE * n
    expected[1] = 10 * n * (n + 1) / 2
    close(own, expected)
    # Outside the replicas it is the whole that changes.
    own.scatter_update(dx.IndexedSlices(np.full((1, 2), 6, np.float32), np.array([0])))
    expected[0] = 6
    close(own, expected)


def test_no_aggregation(case: Case) -> None:
    with case.strategy.scope():
        variable = dx.Variable(VALUE)
    if case.single:
        case.run(lambda: _write(variable, "max", 9.0))
        close(variable, _apply("max", [9.0]))
        return
    with pytest.raises(ValueError, match=r"scatter_max: variable .* has aggregation=NONE"):
        case.run(lambda: _write(variable, "max", 9.0))


def test_no_rows_change_nothing(case: Case) -> None:
    """As of a batch without examples."""
    variable = case.variable(VALUE)
    none = jnp.zeros((0,), jnp.int32)

    def across() -> None:
        for name in ("add", "sub", "mul", "div", "max", "min", "update"):
            getattr(variable, f"scatter_{name}")(dx.IndexedSlices(jnp.zeros((0, 2)), none))
        for name in ("add", "sub", "update"):
            getattr(variable, f"scatter_nd_{name}")(jnp.zeros((0, 2), jnp.int32), jnp.zeros(0))

    case.across(across)
    close(variable, VALUE)

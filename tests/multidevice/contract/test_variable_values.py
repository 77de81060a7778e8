"""A variable is used like an array, and the host can always look at it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close

BINARY: list[Callable[[Any, Any], Any]] = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]
A, B = (
    np.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32),
    np.asarray([[2.0, 2.0], [2.0, 2.0]], np.float32),
)


def test_operators_in_replicas(small: Case) -> None:
    case = small
    variable, other = case.variable(A), case.variable(B)

    def replica_fn(x: Any) -> Any:
        return [
            *(op(variable, x) for op in BINARY),
            *(op(x, variable) for op in BINARY),
            *(op(variable, other) for op in BINARY),
            *(op(variable, 2.0) for op in BINARY),
            variable @ x,
            x @ variable + other,
            -variable,
            +variable,
            abs(variable),
        ]

    expected = [
        *(op(A, B) for op in BINARY),
        *(op(B, A) for op in BINARY),
        *(op(A, B) for op in BINARY),
        *(op(A, np.float32(2.0)) for op in BINARY),
        A @ B,
        B @ A + B,
        -A,
        A,
        A,
    ]
    for result, want in zip(case.run(replica_fn, jnp.asarray(B)), expected, strict=True):
        close(case.parts(result), [want] * case.num_replicas)


def test_methods_and_indexing_in_replicas(small: Case) -> None:
    case = small
    variable = case.variable(A)

    def replica_fn() -> Any:
        return [
            variable[0],
            variable[:, 1],
            variable.T,
            variable.sum(),
            variable.mean(axis=0),
            variable.max(),
            variable.min(),
            variable.reshape(4),
            variable.ravel(),
            variable.astype(jnp.int32),
            variable.transpose(),
            variable.dot(variable.value()),
            variable[None].squeeze(),
            jnp.stack(list(variable)),
        ]

    expected = [A[0], A[:, 1], A.T, A.sum(), A.mean(axis=0), A.max(), A.min(), A.ravel(), A.ravel()]
    expected += [A.astype(np.int32), A.T, A @ A, A, A]
    for result, want in zip(case.run(replica_fn), expected, strict=True):
        close(case.parts(result), [want] * case.num_replicas)


def test_integer_and_truth_operators(small: Case) -> None:
    case = small
    bits, flag = case.variable([6, 3]), case.variable([True, False])

    def across() -> Any:
        return bits & 5, bits | 1, bits ^ 2, 5 & bits, 1 | bits, 2 ^ bits, ~bits, ~flag

    results = [np.asarray(value).tolist() for value in case.across(across)]
    assert results == [[4, 1], [7, 3], [4, 1], [4, 1], [7, 3], [4, 1], [-7, -4], [False, True]]


def test_the_host_reads_a_scalar(case: Case) -> None:
    variable, count = case.variable(2.5), case.variable(3)
    assert (float(variable), int(count), bool(count), complex(variable)) == (2.5, 3, True, 2.5 + 0j)
    assert [10, 20, 30, 40][count] == 40
    assert (variable.item(), count.item()) == (2.5, 3)
    assert (f"{variable:.2f}", f"{count:03d}", f"{variable:>8.1e}") == ("2.50", "003", " 2.5e+00")
    assert f"{variable}" == repr(variable)


def test_the_host_reads_an_array(case: Case) -> None:
    variable = case.variable(A)
    assert np.asarray(variable).tolist() == A.tolist()
    assert np.asarray(variable, dtype=np.float64).dtype == np.float64
    assert variable.numpy().tolist() == A.tolist()
    assert jnp.asarray(variable).tolist() == A.tolist()
    assert np.sum(np.asarray(variable)) == A.sum()
    assert (np.asarray(B) + variable).tolist() == (A + B).tolist()
    assert len(variable) == 2
    assert [row.tolist() for row in variable] == A.tolist()
    assert (variable.shape, variable.ndim, variable.size) == ((2, 2), 2, 4)
    assert variable.dtype == jnp.float32


def test_the_host_keeps_what_it_read(case: Case) -> None:
    variable = case.variable(A)
    copy = variable.numpy()
    copy[0, 0] = 100.0
    assert variable.numpy().tolist() == A.tolist()
    before = np.asarray(variable)
    case.across(lambda: variable.assign(B))
    assert before.tolist() == A.tolist()


def test_a_copy_is_looked_at_alone(case: Case) -> None:
    variable = case.variable([1.0, 2.0], name="w")
    for index, copy in enumerate(case.strategy.experimental_local_results(variable)):
        assert copy.name == ("w:0" if index == 0 else f"w/replica_{index}:0")
        assert (copy.shape, copy.dtype) == ((2,), jnp.float32)
        assert copy.value().tolist() == copy.read_value().tolist() == [1.0, 2.0]
        assert (copy + 1).tolist() == [2.0, 3.0]
        assert case.strategy.extended.value_container(copy) is variable
    assert case.strategy.extended.value_container(5) == 5


def test_what_a_variable_says_of_itself(case: Case) -> None:
    variable = case.variable([1.0], name="kernel")
    assert (variable.name, variable.trainable) == ("kernel:0", True)
    assert case.variable([1.0], trainable=False).trainable is False
    assert case.variable([1.0]).name == "Variable:0"
    assert case.variable(1, dtype=jnp.float32).dtype == jnp.float32
    assert case.strategy.extended.read_var(variable).tolist() == [1.0]
    assert variable.value().tolist() == variable.read_value().tolist() == [1.0]
    assert len({variable, variable, case.variable([1.0])}) == 2


def test_assign_returns_the_variable(case: Case) -> None:
    variable = case.variable(1.0)
    assert variable.assign(2.0).assign_add(3.0).assign_sub(1.0) is variable
    assert variable.assign(2.0, read_value=False, name="x", use_locking=True) is variable
    assert float(variable) == 2.0


def test_there_is_no_number_while_a_step_is_traced(strategy: Any) -> None:
    with strategy.scope():
        variable = dx.Variable(1.0, name="w")
    with pytest.raises(RuntimeError, match=r"numpy\(\): variable 'w'.*being traced.*Return it"):
        dx.function(lambda: float(variable))()


def test_plain_jit_writes_no_variable(strategy: Any) -> None:
    with strategy.scope():
        variable = dx.Variable(1.0, name="w")
        with pytest.raises(
            RuntimeError, match=r"assign: variable 'w'.*still tracing.*@dx.function"
        ):
            jax.jit(variable.assign)(2.0)
    assert float(variable) == 1.0


def test_a_replica_writes_no_variable_inside_jit(scoped: Case) -> None:
    variable = scoped.variable(1.0, name="w", aggregation="MEAN")

    def replica_fn(x: Any) -> Any:
        return jax.jit(lambda y: variable.assign(y).read_value())(x)

    with pytest.raises(RuntimeError, match=r"assign: variable 'w'.*(@dx.function|Return the new)"):
        scoped.run(replica_fn, jnp.asarray(2.0))
    assert float(variable) == 1.0

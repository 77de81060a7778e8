"""JAX takes a variable wherever it takes an array, and remembers no value of it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import distribax as dx
from tests.multidevice.contract.cases import Case, close, make_strategy, replica_number

A = np.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
X = np.asarray([1.0, -1.0], np.float32)


def _train(w: Any, x: Any) -> Any:
    """One step of an optimizer of optax, with a nest of variables as its parameters."""
    optimizer, params = optax.adamw(0.1), {"w": w}
    grads = jax.grad(lambda p: (p["w"] @ x).sum())(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)["w"]


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda w, x: jnp.matmul(x, w),
    "sum": lambda w, x: jnp.sum(w, axis=0),
    "where": lambda w, x: jnp.where(w > 2, w, 0),
    "relu": lambda w, x: jax.nn.relu(w - 2),
    "softmax": lambda w, x: jax.nn.softmax(w),
    "norm": lambda w, x: jnp.linalg.norm(w),
    "einsum": lambda w, x: jnp.einsum("ij,j->i", w, x),
    "concatenate": lambda w, x: jnp.concatenate([w, w[:1]]),
    "array": lambda w, x: jnp.array([w, w]),
    "like": lambda w, x: jnp.zeros_like(w) + jnp.ones_like(w),
    "bare lax": lambda w, x: lax.add(lax.exp(w), lax.dot(w, w)),
    "grad": lambda w, x: jax.grad(lambda v: (v @ x).sum() ** 2)(w),
    "jacfwd": lambda w, x: jax.jacfwd(lambda v: v @ x)(w),
    "vmap": lambda w, x: jax.vmap(lambda row: row @ x)(w),
    "jit": lambda w, x: jax.jit(lambda v, y: v @ y)(w, x),
    "scan": lambda w, x: lax.scan(lambda c, row: (c + row.sum() * w[0, 1], row), 0.0, w)[0],
    "cond": lambda w, x: lax.cond(x[0] > 0, lambda v: v * 2, lambda v: v, w),
    "fori": lambda w, x: lax.fori_loop(0, 2, lambda _, c: c + w, w),
    "optax loss": lambda w, x: optax.l2_loss(w) + optax.tree.norm([w]),
    "optax step": _train,
    "tree": lambda w, x: jax.tree.map(lambda v, g: v - g, [w], [jnp.ones((2, 2))])[0],
    "methods": lambda w, x: w.std() + w.cumsum()[2] + w.clip(0, 2).prod() + w.argmax() + w.mT[0, 1],
    "at": lambda w, x: w.at[0].set(5.0),
    "eq": lambda w, x: (w == 1.0) | (w != 4),
    "round": lambda w, x: round(w / 3) + divmod(w, 2)[1],
    "index": lambda w, x: x[w.astype(int)[0] % 2] + w[w[0, 0].astype(int), 0],
    "of the class": lambda w, x: w.nbytes + w.itemsize + w.size + len(w) + jnp.ones(w.shape),
}


def _all(w: Any, x: Any) -> dict[str, Any]:
    return {name: fn(w, x) for name, fn in FUNCTIONS.items()}


def test_functions_of_jax_take_a_variable(case: Case) -> None:
    variable = case.variable(A)
    expected = _all(jnp.asarray(A), jnp.asarray(X))
    outside = case.across(lambda x: _all(variable, x), X)
    inside = case.run(lambda x: _all(variable, x), jnp.asarray(X))
    for name, want in expected.items():
        close(outside[name], want, 1e-5)
        close(case.parts(inside[name]), [want] * case.num_replicas, 1e-5)


def test_a_loss_uses_variables_in_functions_of_jax(case: Case) -> None:
    w, b = case.variable(A), case.variable(X)

    def loss(x: Any) -> Any:
        return jnp.sum(jax.nn.sigmoid(jnp.add(jnp.matmul(x, w), b)))

    result, grads = case.run(dx.value_and_grad(loss, [w, b]), jnp.asarray(X))

    def of_arrays(arrays: Any) -> Any:
        return jnp.sum(jax.nn.sigmoid(X @ arrays[0] + arrays[1]))

    want, want_grads = jax.value_and_grad(of_arrays)([jnp.asarray(A), jnp.asarray(X)])
    close(case.parts(result), [want] * case.num_replicas)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        close(case.parts(grad), [want_grad] * case.num_replicas)


def test_a_mirrored_value_is_an_array_too(several: Case) -> None:
    def across(value: Any) -> Any:
        mirrored = several.strategy.extended.reduce_to("MEAN", value, None)
        assert isinstance(mirrored, dx.Mirrored)
        return [mirrored == 2.0, jnp.sum(mirrored), lax.neg(mirrored), jax.jit(jnp.exp)(mirrored)]

    results = several.across(across, several.each(lambda _: jnp.asarray(2.0)))
    close(results, [True, 2.0, -2.0, np.exp(2.0)])


def test_collectives_take_a_variable(case: Case) -> None:
    variable = case.variable([1.0, 2.0])

    def replica_fn() -> Any:
        context = dx.get_replica_context()
        merged = context.merge_call(lambda _, v: jnp.sum(v), args=(variable,))
        return context.all_reduce("SUM", {"v": variable})["v"], merged

    total, merged = case.run(replica_fn)
    count = case.num_replicas
    close(case.parts(total), [[count * 1.0, count * 2.0]] * count)
    close(case.parts(merged), [3.0] * count)


def test_comparisons_compare_values(case: Case) -> None:
    variable = case.variable(3)
    same, other, unknown = case.across(lambda: (variable == 3, variable != 3, variable == None))  # noqa: E711
    assert (bool(same), bool(other), unknown) == (True, False, False)
    assert variable == 3
    twin = case.variable(3)
    assert {variable: 1, twin: 2}[twin] == 2
    assert variable.ref() == variable.ref() != twin.ref()
    assert {variable.ref(): "v"}[variable.ref()] == "v"
    assert variable.ref().deref() is variable
    assert "Reference wrapping" in repr(variable.ref())
    assert variable.ref() != 3


# What JAX remembers.


def test_a_jitted_function_takes_the_value_of_each_call(case: Case) -> None:
    variable = case.variable(2.0)
    double = jax.jit(lambda v: v * 2)
    assert float(double(variable)) == 4.0
    case.across(lambda: variable.assign(5.0))
    assert float(double(variable)) == 10.0


def test_a_jitted_function_does_not_close_over_a_variable(strategy: Any) -> None:
    with strategy.scope():
        variable = dx.Variable(1.0, name="w")
        for closed in (lambda x: x * variable, jax.grad(lambda x: jnp.sum(variable) * x)):
            with pytest.raises(RuntimeError, match=r"variable 'w'.*inside jax.jit\..*fn\(x, v\)"):
                jax.jit(closed)(2.0)


def test_bodies_that_jax_keeps_see_each_value(case: Case) -> None:
    """JAX traces the body of a loop once, if it is the same function object each time."""
    variable = case.variable(2.0, aggregation="MEAN")
    remembered = jax.checkpoint(lambda x: x * variable)

    def body(carry: Any, x: Any) -> Any:
        return carry + x * variable, None

    def branch(x: Any) -> Any:
        return jnp.sum(variable) + x

    def replica_fn(x: Any) -> Any:
        def compute() -> Any:
            total, _ = lax.scan(body, 0.0, jnp.ones(3))
            return total + remembered(x) + lax.cond(x > 0, branch, branch, x)

        first, grad = dx.value_and_grad(compute, variable)()
        variable.assign(variable * 10)
        return first, grad, compute()

    step = case.step(lambda x: case.strategy.run(replica_fn, args=(x,)))
    for value in (2.0, 20.0):
        first, grad, second = step(jnp.asarray(1.0))
        close(case.parts(first), [5 * value + 1.0] * case.num_replicas)
        close(case.parts(grad), [5.0] * case.num_replicas)
        close(case.parts(second), [50 * value + 1.0] * case.num_replicas)


def test_bodies_that_jax_keeps_see_the_replicas_own_value(case: Case) -> None:
    variable = case.variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def body(carry: Any, x: Any) -> Any:
        return carry + x * variable, None

    def replica_fn() -> Any:
        variable.assign(replica_number())
        return lax.scan(body, 0.0, jnp.ones(2))[0]

    results = case.parts(case.run(replica_fn))
    close(results, [2.0 * (index + 1) for index in range(case.num_replicas)])


# Parts of a variable.


def test_a_part_of_a_variable_is_assigned(case: Case) -> None:
    variable = case.variable(np.zeros((3, 2), np.float32))

    def across(index: Any) -> Any:
        before = variable[1]
        assert variable[1].assign([1.0, 2.0]) is variable
        variable[2:, 0].assign_add([3.0])
        variable[index].assign_sub(1.0)
        return before, variable[1]

    before, after = case.across(across, 0)
    assert variable.numpy().tolist() == [[-1.0, -1.0], [1.0, 2.0], [3.0, 0.0]]
    assert (before.tolist(), after.tolist()) == ([0.0, 0.0], [1.0, 2.0])
    assert isinstance(variable[0], jax.Array)
    with pytest.raises(ValueError, match=r"shape \(3,\) does not fit \[0\] of variable.*\(2,\)"):
        case.across(lambda: variable[0].assign([1.0, 2.0, 3.0]))


PARTS: list[Any] = [
    (np.array([[0, 1], [1, 2]]),), ([0, 0], [0, 1]), ([0, 0], [1, 1]), ([2, 0], 1), ...,
    np.array([[True, False], [False, True], [False, False]]), np.array([], int), (None, 0),
]  # fmt: skip


def test_parts_are_those_of_an_array(case: Case) -> None:
    """Rows that an index names several times, and none."""
    start = np.arange(6, dtype=np.float32).reshape(3, 2)
    variable = case.variable(start)

    def across(index: Any, delta: Any) -> Any:
        variable.assign(start)
        variable[index].assign_add(delta)
        added = variable.read_value()
        variable.assign(start)
        variable[index].assign_sub(delta)
        subtracted = variable.read_value()
        variable.assign(start)
        variable[index].assign(7.0)
        return added, subtracted, variable.read_value()

    for index in PARTS:
        delta = np.arange(start[index].size, dtype=np.float32).reshape(start[index].shape) + 1.0
        expected = [start.copy() for _ in range(3)]
        np.add.at(expected[0], index, delta)
        np.subtract.at(expected[1], index, delta)
        expected[2][index] = 7.0
        known = case.across(functools.partial(across, index), jnp.asarray(delta))
        close(known, tuple(expected))
    delta = np.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    traced = case.across(across, jnp.asarray([0, 2, 0]), jnp.asarray(delta))
    close(traced[0], np.add(start, [[6.0, 8.0], [0.0, 0.0], [3.0, 4.0]]))
    for index in (3, (0, -3), np.array([1, 5])):
        with pytest.raises(IndexError, match=r"assign: \[.*\] is not a part of variable"):
            case.across(lambda index=index: variable[index].assign(1.0))


def test_a_number_is_its_own_part(small: Case) -> None:
    variable = small.variable(1.0)
    small.across(lambda: variable[...].assign(2.0))
    small.across(lambda: variable[()].assign_sub(5.0))
    assert float(variable) == -3.0


def test_replicas_assign_a_part_together(case: Case) -> None:
    total = case.variable([5.0, 6.0], aggregation="SUM")
    own = case.variable([5.0, 6.0], synchronization="ON_READ", aggregation="SUM")

    def replica_fn(index: Any) -> Any:
        total[index].assign(replica_number())
        own[1].assign(replica_number())
        return own[1], f"{own[1]!r}"[:5]

    result, _ = case.run(replica_fn, jnp.asarray(0))
    numbers = [index + 1.0 for index in range(case.num_replicas)]
    assert total.numpy().tolist() == [sum(numbers), 6.0]
    close(case.parts(result), numbers)
    case.across(lambda: own[0].assign(1.0))
    assert own.numpy().tolist() == [1.0, sum(numbers)]


# Of several strategies, and of other processes.


def test_what_is_a_distributed_value(case: Case) -> None:
    variable = case.variable(1.0)
    own = case.variable(1.0, synchronization="ON_READ", trainable=True, aggregation=None)
    assert isinstance(variable, dx.DistributedValues) is case.mirrors
    assert isinstance(own, dx.DistributedValues) is not case.single
    assert (variable.synchronization.name == "ON_WRITE") is case.mirrors
    assert (own.trainable, own.synchronization.name, own.aggregation.name) == (
        True,
        "ON_READ",
        "NONE",
    )


def test_a_variable_of_another_strategy(compiled: bool) -> None:
    case, other = Case("mirrored", 2, compiled), Case("one_device", 1, compiled)
    mirrored, central = case.variable(1.0, name="w"), Case("central", 2, compiled).variable(1.0)
    plain = dx.Variable(1.0)
    for use in (other.across, other.run):
        for call in (
            lambda: mirrored + 1,
            lambda: mirrored.assign(2.0),
            lambda: central.assign(2.0),
        ):
            with pytest.raises(RuntimeError, match=r"belongs to a .*Strategy, and was used where"):
                use(call)
        assert float(use(lambda: central + plain)) == 2.0
    assert float(mirrored) == float(central) == 1.0
    assert case.numbers(case.run(lambda: plain + 1)) == [2.0, 2.0]


def test_copies_of_a_variable(case: Case) -> None:
    variable = case.variable([1.0, 2.0], name="w", aggregation="MEAN", trainable=False)
    assert copy.copy(variable) is variable
    if case.kind == "served":
        with pytest.raises(TypeError, match=r"deepcopy: variable 'w'.*servers.*dx.Variable\(v"):
            copy.deepcopy(variable)
        return
    twin = copy.deepcopy({"w": variable})["w"]
    case.run(lambda: twin.assign_add(jnp.asarray([1.0, 1.0])))
    assert (variable.numpy().tolist(), twin.numpy().tolist()) == ([1.0, 2.0], [2.0, 3.0])
    assert (twin.name, twin.trainable, twin.aggregation) == ("w:0", False, variable.aggregation)
    with pytest.raises(TypeError, match=r"deepcopy: variable 'w'.*in a dx.function"):
        dx.function(lambda: copy.deepcopy(variable))()
    if case.single:
        made = pickle.loads(pickle.dumps(variable))
        assert (made.numpy().tolist(), made.name, made.trainable) == ([1.0, 2.0], "w:0", False)
        assert made.aggregation is variable.aggregation
    else:
        with pytest.raises(TypeError, match=r"pickle: variable 'w'.*Pickle its value, v.numpy\(\)"):
            pickle.dumps(variable)


def test_arguments_of_tensorflow(strategy: Any) -> None:
    with strategy.scope():
        variable = dx.Variable(
            [1.0],
            validate_shape=False,
            caching_device="CPU:0",
            import_scope="a",
            experimental_enable_variable_lifting=False,
            constraint=abs,
        )
        assert (variable.constraint, variable.get_shape()) == (abs, (1,))
        with pytest.raises(RuntimeError, match=r"initial_value: variable.*v.numpy\(\)"):
            variable.initial_value  # noqa: B018
        with pytest.raises(ValueError, match=r"constraint=3. Expected a function"):
            dx.Variable(1.0, constraint=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"variable_def='x'.*dx.Checkpoint"):
            dx.Variable(1.0, variable_def="x")


def test_replicas_give_a_variable_one_name() -> None:
    def replica_fn() -> Any:
        index = dx.get_replica_context().replica_id_in_sync_group
        return dx.Variable(1.0, name="ab"[int(index)])

    with pytest.raises(RuntimeError, match=r"replica 1 creates the variable 'b'.*created 'a'"):
        make_strategy("mirrored", 2).run(replica_fn)


def test_a_rate_that_is_a_variable_and_a_constraint(case: Case) -> None:
    rate = case.variable(0.5, trainable=False)
    count = case.num_replicas
    if case.kind == "served":
        held = case.variable(1.0, name="w", constraint=abs)
        with pytest.raises(ValueError, match=r"variable 'w'.*has a constraint.*v.assign\("):
            dx.Optimizer(optax.sgd(0.1)).build([held])
        return
    w = case.variable(1.0, constraint=lambda x: jnp.maximum(x, -1.0))
    with case.strategy.scope():
        schedule = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda _: rate * 1.0)
        optimizer = dx.Optimizer(schedule)
    grad = jnp.asarray(1.0 / count)
    step = case.step(
        lambda: case.strategy.run(lambda: optimizer.apply_gradients([(grad * 1.0, w)]))
    )
    for new_rate, expected in ((0.5, 0.5), (1.0, -0.5), (1.0, -1.0)):
        rate.assign(new_rate)
        step()
        assert float(w) == pytest.approx(expected)

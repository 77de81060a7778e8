"""`dx.function` and state: nothing is lost, aliased or half written."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, device, replica_number


def test_a_value_read_before_a_step_is_readable_after_it(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    own = case.variable([1.0, 2.0], synchronization="ON_READ", aggregation="SUM")
    before, before_own = variable.read_value(), own.read_value()
    copies = case.strategy.experimental_local_results(variable)
    read = [copy.read_value() for copy in copies]
    step = case.step(lambda: variable.assign_add([1.0, 1.0]))
    run = case.step(lambda: case.strategy.run(lambda: own.assign_add(jnp.ones(2))))
    for _ in range(3):
        step()
        run()
    assert before.tolist() == [1.0, 2.0]
    assert [value.tolist() for value in read] == [[1.0, 2.0]] * len(read)
    assert before_own.tolist() == [case.num_replicas, 2.0 * case.num_replicas]
    assert variable.numpy().tolist() == [4.0, 5.0]


def test_results_do_not_alias_variables(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    own = case.variable([1.0, 2.0], synchronization="ON_READ")

    def across() -> Any:
        before = variable.read_value()
        variable.assign_add([1.0, 1.0])
        in_replica = case.strategy.run(lambda: own.assign_add(jnp.ones(2)).read_value())
        return before, variable.read_value(), variable.value() + 0, in_replica

    step = case.step(across)
    first = step()
    for _ in range(3):
        step()
    assert [np.asarray(value).tolist() for value in first[:3]] == [
        [1.0, 2.0],
        [2.0, 3.0],
        [2.0, 3.0],
    ]
    assert case.numbers(first[3]) == [[2.0, 3.0]] * case.num_replicas


def test_variables_share_no_buffer(case: Case) -> None:
    first, second = case.variable([1.0, 2.0]), case.variable([3.0, 4.0])
    x = jnp.asarray([5.0, 6.0])
    copy = case.step(lambda: first.assign(second))
    fill = case.step(lambda x: (first.assign(x), second.assign(x)))
    both = case.step(lambda x: (first.assign(x + 1), second.assign(x + 1))[0].read_value())
    swap = case.step(lambda: (lambda t: (first.assign(second), second.assign(t)))(first.value()))
    grow = case.step(lambda: first.assign_add([1.0, 1.0]))
    copy()
    grow()
    assert (first.numpy().tolist(), second.numpy().tolist()) == ([4.0, 5.0], [3.0, 4.0])
    swap()
    assert (first.numpy().tolist(), second.numpy().tolist()) == ([3.0, 4.0], [4.0, 5.0])
    fill(x)
    grow()
    assert (first.numpy().tolist(), second.numpy().tolist()) == ([6.0, 7.0], [5.0, 6.0])
    result = both(x)
    grow()
    grow()
    assert result.tolist() == [6.0, 7.0]
    assert (first.numpy().tolist(), second.numpy().tolist()) == ([8.0, 9.0], [6.0, 7.0])
    assert x.tolist() == [5.0, 6.0]


def test_variables_that_are_only_read_stay(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    step = case.step(lambda x: case.strategy.run(lambda: variable * x))
    for _ in range(2):
        step(2.0)
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_writes_between_steps_are_seen(case: Case) -> None:
    variable = case.variable(1.0, aggregation="MEAN")
    step = case.step(
        lambda: case.strategy.run(lambda: variable.assign_add(jnp.asarray(1.0)).read_value())
    )
    step()
    variable.assign(10.0)
    assert case.numbers(step()) == [11.0] * case.num_replicas
    case.strategy.run(lambda: variable.assign(jnp.asarray(20.0)))
    assert case.numbers(step()) == [21.0] * case.num_replicas
    assert float(variable) == 21.0


def test_exceptions_reach_the_user_and_nothing_is_half_written(case: Case) -> None:
    error = ZeroDivisionError("mine")
    variable = case.variable(1.0)
    own = case.variable(1.0, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")
    fail = [True]

    def across() -> Any:
        variable.assign(2.0)
        case.strategy.run(lambda: own.assign_add(replica_number()))
        if fail[0]:
            raise error
        return variable.read_value()

    step = dx.function(across)
    with case.strategy.scope():
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            step()
        assert caught.value is error
        assert (float(variable), float(own)) == (1.0, 1.0)
        fail[0] = False
        assert float(step()) == 2.0
    assert (float(variable), float(own)) == (2.0, 2.0)


def test_an_exception_in_a_replica_keeps_its_type(case: Case) -> None:
    variable = case.variable(1.0, aggregation="MEAN")

    class Mine(Exception):
        pass

    def replica_fn() -> None:
        variable.assign(replica_number() * 0 + 7.0)
        raise Mine("here")

    step = dx.function(lambda: case.strategy.run(replica_fn))
    for _ in range(2):
        with pytest.raises(Mine, match="here"):
            step()
    assert float(variable) == 1.0
    assert case.run(lambda: 1) == 1


@pytest.mark.parametrize("transform", ["scan", "cond", "vmap", "jit"])
def test_transformations_keep_their_values(small: Case, transform: str) -> None:
    case = small
    variable = case.variable(0.0, name="w", aggregation="MEAN")

    def write(x: Any) -> Any:
        variable.assign(x)
        return x

    calls = {
        "scan": lambda x: jax.lax.scan(lambda c, _: (write(c), None), x, None, length=2)[0],
        "cond": lambda x: jax.lax.cond(x > 0, write, lambda x: x, x),
        "vmap": lambda x: jax.vmap(write)(jnp.stack([x, x])),
        "jit": lambda x: jax.jit(write)(x),
    }
    for step in (
        dx.function(calls[transform]),
        dx.function(lambda x: case.strategy.run(calls[transform], args=(x * 1.0,))),
    ):
        with (
            case.strategy.scope(),
            pytest.raises(RuntimeError, match=r"assign: variable 'w'.*cannot leave it.*outside"),
        ):
            step(jnp.asarray(1.0))
    assert float(variable) == 0.0


def test_a_variable_assigned_on_some_branches(case: Case) -> None:
    variable = case.variable(0.0)

    def across(x: Any, write: bool) -> Any:
        if write:
            variable.assign(x)
        return variable + x

    step = case.step(across)
    with case.strategy.scope():
        values = [float(step(1.0, False)), float(step(2.0, True)), float(step(3.0, False))]
    assert values == [1.0, 4.0, 5.0]
    assert float(variable) == 2.0


def test_many_variables_at_once(case: Case) -> None:
    variables = [case.variable(float(index)) for index in range(20)]

    def across() -> Any:
        for index, variable in enumerate(variables):
            if index % 2:
                variable.assign(variable + variables[index - 1])
        return sum(variable.value() for variable in variables)

    step = case.step(across)
    step()
    total = float(step())
    numbers = [float(index) for index in range(20)]
    for _ in range(2):
        numbers = [
            value + numbers[index - 1] if index % 2 else value
            for index, value in enumerate(numbers)
        ]
    assert total == sum(numbers)


def test_steps_of_several_threads_do_not_mix(strategy: Any) -> None:
    with strategy.scope():
        variables = [dx.Variable(0.0) for _ in range(3)]
    results: dict[int, float] = {}

    def work(index: int) -> None:
        step = dx.function(lambda: variables[index].assign_add(float(index)).read_value())
        for _ in range(5):
            results[index] = float(step())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert results == {0: 0.0, 1: 5.0, 2: 10.0}


def test_variables_of_other_strategies_take_part(scoped: Case) -> None:
    """A counter made outside any scope is read and written beside the strategy's variables."""
    counter = dx.Variable(0)
    with dx.OneDeviceStrategy(device(6)).scope():
        elsewhere = dx.Variable(1.0)
    inside = scoped.variable(1.0, aggregation="MEAN")

    def across() -> Any:
        counter.assign_add(1)
        elsewhere.assign(elsewhere * 2)
        scoped.strategy.run(lambda: inside.assign(inside + counter.value()))
        return inside + elsewhere

    step = scoped.step(across)
    assert [float(step()), float(step())] == [4.0, 8.0]
    assert (int(counter), float(elsewhere), float(inside)) == (2, 4.0, 4.0)
    assert elsewhere.device.endswith(f"CPU:{jax.local_devices().index(device(6))}")
    assert elsewhere.values[0].read_value().devices() == {device(6)}
    # And each is of use to a step of its own.
    assert int(dx.function(lambda: counter.assign_add(1).read_value())()) == 3
    assert float(dx.function(lambda: elsewhere.assign_add(1.0).read_value())()) == 5.0


def test_reading_inside_jit_is_refused(case: Case) -> None:
    """`jax.jit` remembers its traces, and would remember a value of this one."""
    variable = case.variable(1.0, name="w")
    inner = jax.jit(lambda x: x * variable)
    for step in (
        dx.function(lambda: inner(2.0)),
        dx.function(lambda: case.strategy.run(lambda: inner(2.0))),
    ):
        with (
            case.strategy.scope(),
            pytest.raises(RuntimeError, match=r"variable 'w'.*inside jax.jit, in.*fn\(x, v\)"),
        ):
            step()
    passed = jax.jit(lambda x, v: x * v)
    assert float(dx.function(lambda: passed(2.0, variable))()) == 2.0


def test_a_function_called_inside_jit_is_part_of_it(case: Case) -> None:
    """Compiled apart, it would give `jax.jit` values to keep, and variables values of the trace."""
    variable = case.variable(1.0, name="w")
    double = dx.function(lambda: variable * 2.0)
    count = dx.function(lambda: variable.assign_add(1.0).read_value())
    with case.strategy.scope():
        for fn in (double, count, double.get_concrete_function()):
            with pytest.raises(RuntimeError, match=r"variable 'w'.*jax.jit"):
                jax.jit(lambda x, fn=fn: x + fn())(1.0)
        with pytest.raises(RuntimeError, match=r"variable 'w'.*jax.jit"):
            jax.jit(lambda x: dx.Optimizer(optax.sgd(1.0)).apply_gradients([(x, variable)]))(1.0)
        assert (float(variable), float(double()), float(count())) == (1.0, 2.0, 2.0)


def test_a_nan_is_found_where_it_is_computed(case: Case) -> None:
    """`jax_debug_nans` runs the program again, step by step; nothing is written by then."""
    variable = case.variable(1.0, aggregation="MEAN")
    step = case.step(
        lambda x: case.strategy.run(lambda x: variable.assign_add(jnp.log(x)), args=(x,))
    )
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        step(jnp.asarray(-1.0))
    step(jnp.asarray(1.0))
    assert float(variable) == 1.0


def test_gradients_flow_through_a_function(case: Case) -> None:
    """As through a `tf.function` that a tape watches, whatever the function has captured."""
    variable = case.variable(3.0)
    square = dx.function(lambda x: variable * variable * x)
    differentiate = dx.value_and_grad(lambda x: square(x) + 1.0, variable)
    for _ in range(2):
        loss, gradient = case.run(differentiate, 2.0)
        assert case.numbers(loss) == [19.0] * case.num_replicas
        assert case.numbers(gradient) == [12.0] * case.num_replicas
        # It was not compiled for the values that stood in for the variable.
        assert case.numbers(case.run(square, 2.0)) == [18.0] * case.num_replicas

    def of_captured(parameter: jax.Array) -> jax.Array:
        return dx.function(lambda x: parameter * x)(2.0)

    assert float(jax.grad(of_captured)(1.0)) == 2.0
    assert jax.vmap(of_captured)(jnp.ones(2)).tolist() == [2.0, 2.0]

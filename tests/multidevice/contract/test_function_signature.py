"""What `dx.function` is specialised for, and the forms in which it is used."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx


class Counted:
    """A step that counts how often Python runs it."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.traces = 0

    def __call__(self, x: Any, *rest: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self.strategy.run(lambda x: x * 2, args=(x,))


def test_one_signature_is_traced_once(strategy: Any) -> None:
    counted = Counted(strategy)
    step = dx.function(counted)
    step(jnp.ones(2))
    traces = counted.traces
    for value in (1.0, 2.0, 3.0):
        assert np.asarray(step(jnp.ones(2) * value)).ravel()[0] == 2 * value
    assert (step.trace_count, counted.traces) == (1, traces)


def test_new_shapes_types_and_forms_are_traced_again(any_strategy: Any) -> None:
    strategy = any_strategy
    step = dx.function(Counted(strategy))
    calls = [
        (jnp.ones(2),),
        (jnp.ones(3),),
        (jnp.ones(2, jnp.int32),),
        (np.ones(2, np.float32), None),
        (jnp.ones(2), [1.0]),
        (jnp.ones(2), (1.0,)),
        (jnp.ones(2), {"a": 1.0}),
    ]
    for count, args in enumerate(calls, start=1):
        step(*args)
        assert step.trace_count == count
    for args in calls:
        step(*args)
    assert step.trace_count == step.experimental_get_tracing_count() == len(calls)


def test_numbers_are_inputs_and_other_objects_are_not(any_strategy: Any) -> None:
    strategy = any_strategy
    step = dx.function(Counted(strategy))
    for number in (1, 2, 3):
        step(jnp.ones(2), number, number * 1.5)
    assert step.trace_count == 1
    for text in ("a", "b", "a"):
        step(jnp.ones(2), text)
    assert step.trace_count == 3
    unhashable = [object(), {"x"}]
    for thing in unhashable * 2:
        step(jnp.ones(2), thing)
    assert step.trace_count == 5


def test_truth_values_choose_a_branch(any_strategy: Any) -> None:
    strategy = any_strategy

    @dx.function
    def step(x: Any, double: bool) -> Any:
        return strategy.run(lambda: x * 2 if double else x)

    results = [float(np.asarray(step(3.0, double)).ravel()[0]) for double in (True, False, True)]
    assert results == [6.0, 3.0, 6.0]
    assert step.trace_count == 2


def test_python_numbers_keep_their_kind(any_strategy: Any) -> None:
    strategy = any_strategy
    kinds = dx.function(lambda *numbers: [jnp.asarray(number).dtype.name for number in numbers])
    with strategy.scope():
        assert kinds(1, 1.0, 1j, np.float16(1), np.int8(1)) == [
            "int32",
            "float32",
            "complex64",
            "float16",
            "int8",
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        {"static_argnums": (1,)},
        {"static_argnums": -1},
        {"static_argnames": "n"},
    ],
)
def test_static_arguments_are_python_values(any_strategy: Any, options: Any) -> None:
    strategy = any_strategy

    @dx.function(**options)
    def step(x: Any, n: int) -> Any:
        return strategy.run(lambda: jnp.sum(jnp.stack([x] * n)))

    assert [float(np.asarray(step(jnp.ones(()), n)).ravel()[0]) for n in (2, 3, 2)] == [
        2.0,
        3.0,
        2.0,
    ]
    assert step.trace_count == 2


def test_static_arguments_by_name() -> None:
    @dx.function(static_argnames=("n", "unit"))
    def step(x: Any, n: int = 1, *, unit: str = "m") -> Any:
        return sum([x] * n), f"{n}{unit}"

    assert step(jnp.ones(()), n=2, unit="s")[1] == "2s"
    assert step(jnp.ones(()), 3)[1] == "3m"
    assert step(x=jnp.ones(()))[1] == "1m"
    assert step.trace_count == 3


def test_negative_numbers_of_missing_arguments() -> None:
    step = dx.function(lambda x=1.0: x, static_argnums=-1)
    assert step() == 1.0


def test_decorators_with_and_without_arguments(any_strategy: Any) -> None:
    strategy = any_strategy

    @dx.function
    def plain(x: Any) -> Any:
        """Doubles."""
        return x * 2

    @dx.function()
    def called(x: Any) -> Any:
        return x * 2

    with strategy.scope():
        assert (
            float(plain(2.0)) == float(called(2.0)) == float(dx.function(lambda x: x * 2)(2.0)) == 4
        )
    assert (plain.__name__, plain.__doc__) == ("plain", "Doubles.")
    assert plain.python_function(3) == 6
    assert repr(plain).endswith("plain, 1 compiled>")
    assert dx.function(plain) is plain


def test_a_function_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"dx.function: fn=3 is not callable.*@dx.function"):
        dx.function(3)  # type: ignore[call-overload]


def test_methods_belong_to_their_object(any_strategy: Any) -> None:
    strategy = any_strategy

    class Model:
        def __init__(self, value: float) -> None:
            self.weight = dx.Variable(value)

        @dx.function
        def step(self, x: Any) -> Any:
            self.weight.assign_add(x)
            return self.weight.read_value()

        @dx.function(static_argnums=0)
        def repeat(self, n: int) -> Any:
            return jnp.stack([self.weight.value()] * n)

    with strategy.scope():
        one, two = Model(1.0), Model(10.0)
        assert [float(one.step(1.0)), float(one.step(1.0)), float(two.step(1.0))] == [
            2.0,
            3.0,
            11.0,
        ]
        assert one.repeat(3).shape == (3,)
    assert (one.step.trace_count, two.step.trace_count) == (1, 1)
    assert isinstance(Model.step, type(one.step))


def test_methods_of_objects_without_a_dict() -> None:
    class Slotted:
        __slots__ = ()

        @dx.function
        def double(self, x: Any) -> Any:
            return x * 2

    assert float(Slotted().double(2.0)) == 4.0


def test_donated_arguments_are_used_up(any_strategy: Any) -> None:
    strategy = any_strategy
    step = dx.function(lambda x, y: x + y, donate_argnums=0)
    with strategy.scope():
        first, second = jnp.ones(2), jnp.ones(2)
        assert step(first, second).tolist() == [2.0, 2.0]
        assert second.tolist() == [1.0, 1.0]
        assert first.is_deleted()
        with pytest.raises(RuntimeError, match=r"array float32\[2\] has no value.*donated"):
            step(first, second)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_donated_values_of_replicas_are_used_up(pair: Any, compiled: bool) -> None:
    add = dx.function(lambda x: pair.run(lambda x: x + 1.0, args=(x,)), donate_argnums=0)
    read = lambda x: pair.reduce("SUM", x, axis=None)  # noqa: E731
    n = pair.num_replicas_in_sync
    value = add(pair.run(lambda: jnp.ones(2)))
    again = add(value)
    for use in (dx.function(read) if compiled else read, add):
        with pytest.raises(RuntimeError, match=rf"array float32\[{2 * n}\] has no value.*donated"):
            use(value)
    assert read(again).tolist() == [3.0 * n, 3.0 * n]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_variable_whose_memory_was_donated(pair: Any, compiled: bool) -> None:
    with pair.scope():
        v = dx.Variable(jnp.ones(2))
    add = dx.function(lambda x: x + 1.0, donate_argnums=0)
    read = dx.function(lambda: v + 1.0) if compiled else v.numpy
    assert add(v).tolist() == add(jnp.copy(v)).tolist() == [2.0, 2.0]
    read()
    value = v.value()
    add(value)
    if value.is_deleted():  # Not where it was a copy.
        with pytest.raises(RuntimeError, match=r"jnp.copy\(v\)"):
            read()
    v.assign([3.0, 3.0])
    assert v.numpy().tolist() == [3.0, 3.0]


def test_tracing_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @dx.function
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    with caplog.at_level("INFO", logger="distribax"):
        double(jnp.ones(2))
        assert not caplog.records
        double(jnp.ones(3))
        double(jnp.ones(3))
    assert [record.name for record in caplog.records] == ["distribax.execution.functions.function"]
    assert "double: traced again for new arguments (trace 2)" in caplog.text


def test_errors_of_jax_name_the_function_and_its_arguments(pair: Any) -> None:
    with pair.scope():
        w = dx.Variable(1.0, name="w")

    def replica_step(batch: Any, *others: Any) -> None:
        if others[0] > 0 or batch["x"] > 0:
            pass

    def whole(first: Any) -> None:
        if first > w:
            pass

    x = jnp.ones(())
    named = r"the function {} at .*test_function_signature.py.* the value.* of the argument.*{}"
    for step, function, argument in [
        (lambda: pair.run(replica_step, args=({"x": x}, x)), "replica_step", r"others\[0\]"),
        (lambda: pair.run(replica_step, args=({"x": x}, 0)), "replica_step", r"batch\['x'\]"),
        (lambda: pair.run(dx.function(replica_step), args=(1, x)), "replica_step", r"others\[0\]"),
        (lambda: dx.function(whole)(x), "whole", "first and variable 'w'"),
        (lambda: dx.function(whole)(first=x), "whole", "first and variable 'w'"),
    ]:
        with pytest.raises(
            jax.errors.ConcretizationTypeError, match=named.format(function, argument)
        ):
            (dx.function(step) if function == "replica_step" else step)()


def test_another_variable_of_the_same_form_is_not_traced_again(any_strategy: Any) -> None:
    strategy = any_strategy

    @dx.function
    def step(totals: Any, x: Any) -> Any:
        def replica(own: Any, x: Any) -> Any:
            own.assign_add(x)
            return own.read_value()

        results = [strategy.run(replica, args=(total, x)) for total in totals]
        return [strategy.reduce("MEAN", result, axis=None) for result in results]

    def make() -> list[Any]:
        with strategy.scope():
            mirrored = dx.Variable(0.0, aggregation="MEAN")
            return [mirrored, dx.Variable(0.0, synchronization="ON_READ", aggregation="MEAN")]

    first, second = make(), make()
    for count in (1.0, 2.0):
        for totals in (first, second):
            assert [float(each) for each in step(totals, 1.0)] == [count, count]
            assert [float(total.numpy()) for total in totals] == [count, count]
    assert step.trace_count == 1

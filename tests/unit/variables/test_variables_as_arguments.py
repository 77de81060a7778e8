"""Variables given to compiled functions: one program for all of the same form."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx


def make_sharded(value: np.ndarray) -> Any:
    return dx.ShardedVariable([dx.Variable(value[:2]), dx.Variable(value[2:])])


@pytest.mark.parametrize("make", [dx.Variable, make_sharded])
def test_a_program_is_used_for_variables_of_the_same_form(make: Callable[..., Any]) -> None:
    scale = dx.Variable(2.0)
    traced: list[int] = []

    @dx.function
    def step(tables: dict[str, Any], x: Any) -> Any:
        traced.append(1)
        table = tables["table"]
        table.assign_add(jnp.full(table.shape, x))
        scale.assign_add(0.0)
        return table, jnp.sum(table.read_value()) * scale

    first, second, third = (make(np.full((3, 2), float(i), np.float32)) for i in range(3))
    for _ in range(2):
        for table in (first, second, third):
            before = table.numpy()
            same, total = step({"table": table}, 1.0)
            assert same is table
            np.testing.assert_array_equal(table.numpy(), before + 1.0)
            assert float(total) == 2 * np.sum(before + 1.0)
    assert step.trace_count == 1 and len(traced) == 1
    # Another form.
    step({"table": make(np.ones((4, 2), np.float32))}, 1.0)
    assert step.trace_count == 2


def test_the_same_variable_in_two_roles_is_another_program() -> None:
    @dx.function
    def move(source: Any, target: Any) -> None:
        target.assign_add(source)
        source.assign(0.0)

    a, b, c = dx.Variable(1.0), dx.Variable(2.0), dx.Variable(3.0)
    move(a, b)
    move(b, c)
    assert (float(a), float(b), float(c)) == (0.0, 0.0, 6.0) and move.trace_count == 1
    move(c, c)
    assert float(c) == 0.0 and move.trace_count == 2


def test_elements_of_data_sets_come_along() -> None:
    @dx.function
    def step(total: Any, iterator: Any) -> None:
        total.assign_add(next(iterator))

    a, b = dx.Variable(0), dx.Variable(0)
    iterator = iter(dx.data.Dataset.range(1, 5))
    for total in (a, b, a, b):
        step(total, iterator)
    assert (int(a), int(b)) == (1 + 3, 2 + 4) and step.trace_count == 1


def test_variables_that_code_can_tell_apart_are_traced_apart() -> None:
    a, b, c = (dx.Variable(1.0, name=name) for name in "abc")
    slots = {each.name: dx.Variable(0.0) for each in (a, b, c)}
    by_reference = {each.ref(): index for index, each in enumerate((a, b, c))}

    @dx.function
    def by_name(v: Any) -> None:
        slots[v.name].assign_add(v)

    @dx.function
    def by_ref(v: Any) -> Any:
        return v * by_reference[v.ref()]

    @dx.function
    def beside(v: Any) -> Any:
        v.assign_add(1.0)
        return a + 0.0

    for each in (a, b, c):
        by_name(each)
        assert float(slots[each.name]) == 1.0
    assert [float(by_ref(each)) for each in (a, b, c)] == [0.0, 1.0, 2.0]
    # `a` is also found in the closure: what `b` led to does not fit it, and the reverse.
    assert [float(beside(each)) for each in (b, a, c)] == [1.0, 2.0, 2.0]
    assert [float(each) for each in (a, b, c)] == [2.0, 2.0, 2.0]


def test_variables_are_told_apart_by_what_users_keep_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = dx.Variable(1.0), dx.Variable(10.0)
    slots = [dx.Variable(0.0), dx.Variable(0.0)]
    places, rates = {id(a): 0, id(b): 1}, {id(a): 1.0, id(b): 100.0}
    settings = ModuleType("settings_of_a_test")
    settings.inner = ModuleType("inner")  # type: ignore[attr-defined]
    settings.inner.special = b  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)

    @dx.function
    def by_id(v: Any) -> Any:
        slots[places[id(v)]].assign_add(v)
        return v * rates[id(v)]

    @dx.function
    def by_helper(v: Any) -> Any:
        return v * by_place(places, v)

    @dx.function
    def in_module(v: Any) -> Any:
        return v * (1.0 if v is settings.inner.special else 2.0)  # type: ignore[attr-defined]

    @dx.function
    def in_imported(v: Any) -> Any:
        import settings_of_a_test as found  # type: ignore[import-not-found]

        return v * (1.0 if v is found.inner.special else 2.0)

    @dx.function
    def by_shape(v: Any) -> Any:
        # Always the same one, but that cannot be seen from outside.
        slots[len(v.shape)].assign_add(v)
        return v + 0.0

    assert [float(by_id(each)) for each in (a, b)] == [1.0, 1000.0]
    assert [float(each) for each in slots] == [1.0, 10.0]
    assert [float(by_helper(each)) for each in (a, b)] == [0.0, 10.0]
    for in_some_module in (in_module, in_imported):
        assert [float(in_some_module(each)) for each in (a, b)] == [2.0, 10.0]
    assert [float(by_shape(each)) for each in (a, b)] == [1.0, 10.0]
    assert [float(each) for each in slots] == [12.0, 10.0] and by_shape.trace_count == 2


def by_place(places: dict[int, int], v: Any) -> int:
    return places[id(v)]


@pytest.mark.parametrize("late", [False, True])
def test_variables_are_told_apart_by_attributes_of_users(late: bool) -> None:
    a, b = dx.Variable(1.0), dx.Variable(10.0)
    if not late:
        a.rate, a.slot = 1.0, dx.Variable(0.0)  # type: ignore[attr-defined]
    b.rate, b.slot = 100.0, dx.Variable(0.0)  # type: ignore[attr-defined]

    @dx.function
    def step(v: Any) -> Any:
        if hasattr(v, "slot"):
            v.slot.assign_add(v)
        return v * getattr(v, "rate", 1.0)

    assert [float(step(each)) for each in (a, b)] == [1.0, 1000.0]
    assert float(b.slot) == 10.0  # type: ignore[attr-defined]


def test_slots_of_optimizers_stay_with_their_variables() -> None:
    optimizer = dx.Optimizer(optax.sgd(1.0, momentum=0.5))
    a, b = dx.Variable(0.0), dx.Variable(0.0)
    optimizer.build([a, b])

    class Trainer:
        def __init__(self) -> None:
            self.optimizer = optimizer

        @dx.function
        def step(self, v: Any) -> None:
            self.optimizer.apply_gradients([(jnp.float32(1.0), v)])

    trainer = Trainer()
    values = []
    for each in (a, b, a, b):
        trainer.step(each)
        values.append(float(each))
    assert values == [-1.0, -1.0, -2.5, -2.5]


def test_what_a_program_returns_keeps_it_to_its_variable() -> None:
    @dx.function
    def step(v: Any) -> Any:
        return v.assign_add(1.0).values[0], v.read_value()

    a, b = dx.Variable(1.0), dx.Variable(10.0)
    for each in (a, b):
        copy, value = step(each)
        assert float(copy) == float(value) == float(each)
    assert step.trace_count == 2


def test_code_that_can_reach_too_much_is_traced_apart() -> None:
    known = [[number] for number in range(30_000)]

    @dx.function
    def step(v: Any) -> Any:
        return v.assign_add(len(known))

    for each in (dx.Variable(1.0), dx.Variable(2.0)):
        before = float(each)
        assert float(step(each)) == before + len(known)
    assert step.trace_count == 2

"""One variable, and one function, that several threads use at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import distribax as dx
from tests.multidevice.contract.cases import Case

_TIMES = 40


def _run_in_threads(*fns: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def repeat(fn: Callable[[], object]) -> None:
        try:
            for _ in range(_TIMES):
                fn()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(fn,)) for fn in fns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_no_write_is_lost(any_strategy: Any) -> None:
    with any_strategy.scope():
        count = dx.Variable(0.0, aggregation="MEAN")

    @dx.function
    def step() -> None:
        any_strategy.run(lambda: count.assign_add(jnp.ones(())))

    def write() -> None:
        count.assign_add(1.0)

    _run_in_threads(step, step, write, write, lambda: np.isfinite(count.numpy()))
    assert float(count) == 4 * _TIMES


def test_what_a_thread_holds_is_not_overwritten(any_strategy: Any) -> None:
    with any_strategy.scope():
        ramp = dx.Variable(jnp.zeros(64))

    @dx.function
    def step() -> None:
        ramp.assign_add(jnp.ones(64))

    def look() -> None:
        held = ramp.value()
        first = np.array(held)
        assert (first == first[0]).all() and (np.asarray(held + 0) == first).all()

    _run_in_threads(step, look, look)
    assert (ramp.numpy() == _TIMES).all()


def test_own_values_of_replicas(compiled: bool) -> None:
    case = Case("mirrored", 2, compiled)
    total = case.variable(0.0, synchronization="ON_READ", aggregation="SUM")
    add = case.step(lambda: case.strategy.run(lambda: total.assign_add(jnp.ones(()))))
    _run_in_threads(add, add, lambda: np.isfinite(total.numpy()))
    assert float(total.numpy()) == 2 * 2 * _TIMES

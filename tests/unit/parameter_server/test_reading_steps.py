"""Compiled steps that read served variables: each call sees the values of its own moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.parameter_server import Assign
from distribax.testing import local_servers

LARGE = (1000, 100)


@pytest.fixture
def strategy() -> Iterator[Any]:
    """Two servers."""
    with local_servers(2) as strategy:
        yield strategy


@pytest.fixture
def variables(strategy: Any) -> list[Any]:
    """A large value, a small one, a number, and a count that steps write."""
    with strategy.scope():
        return [
            dx.Variable(np.zeros(LARGE, np.float32), name="large"),
            dx.Variable(np.zeros(3, np.float32), name="small"),
            dx.Variable(0, dtype=np.int32, name="number"),
            dx.Variable(0.0, name="count"),
        ]


def _function(variables: list[Any]) -> Any:
    """Returns a step that reads all and writes one."""
    *read, count = variables

    @dx.function
    def step() -> Any:
        count.assign_add(1.0)
        return [value.value().sum() for value in read]

    return step


def test_each_call_reads_what_is_there(variables: list[Any]) -> None:
    large, small, number, _ = variables
    step = _function(variables)
    generator = np.random.default_rng(0)
    values = [np.zeros(LARGE), np.zeros(3), np.zeros(())]
    for _ in range(30):
        assert [float(each) for each in step()] == [float(each.sum()) for each in values]
        changed = generator.integers(3)
        values[changed] = np.full(values[changed].shape, int(generator.integers(100)))
        [large, small, number][changed].assign(values[changed])
    assert step.trace_count == 1


@pytest.mark.parametrize("looks_up", [False, True], ids=["reads", "looks up"])
def test_the_first_call_fetches_when_it_is_compiled(variables: list[Any], looks_up: bool) -> None:
    """What other workers write while a step is being compiled is not lost on it."""
    large, *_, count = variables
    rows = np.zeros(1, np.int32)
    has_compiled = False

    def write(event: str, seconds: float, **labels: object) -> None:
        nonlocal has_compiled
        if event.endswith("backend_compile_duration") and is_first_call and not has_compiled:
            has_compiled = True
            large.assign(np.ones(LARGE, np.float32))

    is_first_call = False
    jax.monitoring.register_event_duration_secs_listener(write)

    @dx.function
    def step() -> Any:
        count.assign_add(1.0)
        value = dx.embedding_lookup(large, rows) if looks_up else large.value()[:1]
        return jnp.tanh(value * 0.5).sum()

    is_first_call = True
    result = step()
    is_first_call = False
    assert has_compiled
    np.testing.assert_allclose(result, LARGE[1] * np.tanh(0.5), rtol=1e-6)
    assert count.numpy() == 1.0


def test_what_a_step_returns_stays_as_it_is(variables: list[Any]) -> None:
    large, small, _, count = variables

    @dx.function
    def step() -> Any:
        count.assign_add(1.0)
        return large.value(), small.value(), jax.lax.stop_gradient(large.value()).reshape(-1)

    returned = []
    for number in range(6):
        for variable in (large, small):
            variable.assign(np.full(variable.shape, number))
        returned.append(step())
    for number, results in enumerate(returned):
        for result in results:
            np.testing.assert_array_equal(result, np.full(result.shape, number))


def test_a_value_that_a_step_writes_to_another_variable(
    strategy: Any, variables: list[Any]
) -> None:
    large, small, _, _ = variables
    with strategy.scope():
        copies = [dx.Variable(np.zeros(LARGE, np.float32)), dx.Variable(np.zeros(3, np.float32))]

    @dx.function
    def step() -> None:
        for variable, copy in zip((large, small), copies, strict=True):
            copy.assign(variable.value())

    for number in range(5):
        for variable in (large, small):
            variable.assign(np.full(variable.shape, number))
        step()
        for copy in copies:
            np.testing.assert_array_equal(copy, np.full(copy.shape, number))


def test_calls_in_several_threads_do_not_see_each_others_values(strategy: Any) -> None:
    with strategy.scope():
        large = dx.Variable(np.zeros((1000, 1000), np.float32))
        small = dx.Variable(np.zeros(1000, np.float32))
        count = dx.Variable(0.0)

    @dx.function
    def step() -> Any:
        count.assign_add(1.0)
        found = large.value(), small.value()
        mixed = jnp.sqrt(found[0] @ found[0].T + 1.0)  # It takes a while.
        return [f(value) for value in found for f in (jnp.min, jnp.max)], mixed[0, 0]

    step()
    ended = threading.Event()
    results: list[Any] = []
    source = strategy.source

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            for variable in (large, small):
                (spec,) = variable.placement.specs
                value = np.full(spec.shape, number, np.float32)
                source.push([(spec.server, Assign(spec.uid, value))])

    def read() -> None:
        results.extend(step()[0] for _ in range(25))

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    ended.set()
    writer.join()
    assert len(results) == 50
    for lowest, highest, low, high in results:
        assert lowest == highest and low == high
    assert len({float(result[0]) for result in results}) > 2


def test_values_that_are_kept_stay_as_they_are(strategy: Any, variables: list[Any]) -> None:
    large, *_ = variables
    step = _function(variables)
    kept = []
    for number in range(12):
        large.assign(np.full(LARGE, number))
        kept.append(strategy.source.client.pull(large.placement.specs)[0])
        assert float(step()[0]) == number * 100_000
    for number, value in enumerate(kept):
        assert np.all(value == number)


@pytest.mark.parametrize(("shape", "dtype"), [((0, 3), "float32"), ((4,), "float64")])
def test_forms_that_jax_copies(strategy: Any, shape: tuple[int, ...], dtype: str) -> None:
    with jax.enable_x64(True), strategy.scope():
        wide = dx.Variable(np.ones(shape, dtype), dtype=dtype)
        step = _function([wide, dx.Variable(0.0)])
        for number in range(4):
            wide.assign(np.full(shape, 2.0**40 + number))
            (total,) = step()
            assert total.dtype == dtype
            assert float(total) == (2.0**40 + number) * np.prod(shape)

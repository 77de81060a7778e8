"""Contexts: scopes, towers, merge calls, and what a tower is told."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import pytest

import distribax as dx
from distribax.contrib import distribute
from tests.multidevice.tower_api.cases import Case, tower, tower_number

# with d.scope()


def test_scope_leads_from_the_default_tower_to_the_cross_tower_context(case: Case) -> None:
    before = distribute.get_tower_context()
    assert before is not None and before.is_single_tower
    assert distribute.get_cross_tower_context() is None
    seen: list[Any] = []

    def look() -> None:
        seen.append(distribute.get_cross_tower_context())
        assert distribute.get_tower_context() is None
        assert distribute.get_distribution_strategy() is case.d
        assert distribute.has_distribution_strategy() == (case.kind != "default")

    case.across(look)
    assert seen and all(found is case.d for found in seen)
    assert distribute.get_tower_context() == before
    assert not distribute.has_distribution_strategy()


def test_scope_gives_the_strategy_and_nests(small: Case) -> None:
    with small.d.scope() as outer, small.d.scope() as inner:
        assert outer is inner is small.d


def test_scopes_of_two_strategies_do_not_nest(pair: distribute.MirroredStrategy) -> None:
    other = distribute.OneDeviceStrategy("CPU:0")
    with (
        pair.scope(),
        pytest.raises(RuntimeError, match="inside the scope of another"),
        other.scope(),
    ):
        pass
    assert not distribute.has_distribution_strategy()


def test_a_scope_is_seen_by_both_interfaces(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        assert dx.get_strategy() is pair.strategy
    with pair.strategy.scope():
        assert distribute.get_distribution_strategy() is pair
    plain = dx.OneDeviceStrategy("CPU:1")
    with plain.scope():
        found = distribute.get_distribution_strategy()
        assert found.strategy is plain
        assert found is distribute.get_distribution_strategy()
    assert distribute.DistributionStrategy(plain) == found
    assert hash(distribute.DistributionStrategy(plain)) == hash(found)
    assert found != pair


# What a strategy is.


def test_devices_and_number_of_towers(case: Case) -> None:
    prefix = "/job:localhost/replica:0/task:0/device:CPU:"
    first = 1 if case.kind == "one_device" else 0
    assert case.d.num_towers == len(case.d.worker_devices)
    assert case.d.worker_devices == [f"{prefix}{first + index}" for index in case.ids]
    holding = [f"{prefix}5"] if case.kind == "central" else case.d.worker_devices
    assert case.d.parameter_devices == holding
    assert case.d.is_single_tower == (case.d.num_towers == 1)
    assert f"of {case.d.num_towers} tower(s) on {prefix}{first}" in repr(case.d)
    assert case.d.configure(session_config=None) is None


def test_without_a_strategy_given_it_is_the_default_one(pair: distribute.MirroredStrategy) -> None:
    default = distribute.get_distribution_strategy()
    with pair.scope():
        made = distribute.DistributionStrategy()
    assert made == default
    assert made.num_towers == 1


# call_for_each_tower


def test_call_for_each_tower_runs_once_for_each_in_a_tower_context(case: Case) -> None:
    contexts: list[Any] = []

    def tower_fn() -> Any:
        here = tower()
        assert here == distribute.get_tower_context()
        assert distribute.get_cross_tower_context() is None
        assert here.distribution_strategy is distribute.get_distribution_strategy() is case.d
        assert here.num_towers == case.d.num_towers
        assert here.is_single_tower == case.d.is_single_tower
        assert repr(case.d) in repr(here)
        contexts.append(here)
        return jnp.asarray(here.tower_id)

    result = case.across(lambda: case.d.call_for_each_tower(tower_fn, run_concurrently=False))
    case.expect(result, distribute.PerDevice, [float(index) for index in case.ids])
    if not case.compiled:
        assert len(set(contexts)) == len(contexts) == case.d.num_towers


def test_call_for_each_tower_may_use_t_and_m_and_any_variable(case: Case) -> None:
    outside = dx.Variable(1000.0)
    v = case.variable(100.0)

    def step() -> Any:
        t = case.d.call_for_each_tower(tower_number)
        m = case.d.broadcast(jnp.asarray(10.0))
        return case.d.call_for_each_tower(
            lambda t, m, *, plain: t + m + v + outside + plain, t, m, plain=0.5
        )

    expected = [1111.5 + index for index in case.ids]
    case.expect(case.across(step), distribute.PerDevice, expected)


def test_call_for_each_tower_takes_a_compiled_function(case: Case) -> None:
    step = dx.function(lambda x: x + tower_number())
    with case.d.scope():
        for _ in range(2):
            result = case.d.call_for_each_tower(step, jnp.asarray(1.0))
    case.expect(result, distribute.PerDevice, [2.0 + index for index in case.ids])
    assert step.trace_count == 1


def test_results_are_merged_by_identity(small: Case) -> None:
    x = object()
    v = small.variable(1.0)
    merged = small.towers(lambda: (x, tower_number(), v))
    assert merged[0] is x
    small.expect(merged[1], distribute.PerDevice, small.numbers)
    assert merged[2] is v


def test_worker_device_index(case: Case) -> None:
    result = case.towers(lambda i: jnp.asarray(i), case.d.worker_device_index)
    case.expect(result, distribute.PerDevice, [float(index) for index in case.ids])
    if case.d.is_single_tower:
        assert case.d.worker_device_index == 0


def test_the_device_of_a_tower(case: Case) -> None:
    if case.compiled and case.wraps:
        with pytest.raises(RuntimeError, match=r"one program for all towers.*Use tower_id"):
            case.towers(lambda: tower().device)
        return
    with case.d.scope():
        assert case.d.unwrap(case.towers(lambda: tower().device)) == case.d.worker_devices


# merge_call


def test_merge_call_goes_to_the_cross_tower_context_and_back(case: Case) -> None:
    def merge_fn(distribution: Any, x: Any, *, scale: float) -> Any:
        assert distribution is case.d
        assert distribute.get_tower_context() is None
        assert distribute.get_cross_tower_context() is case.d
        return sum(distribution.unwrap(x)) * scale

    def tower_fn() -> Any:
        here, x = tower(), tower_number()
        total = here.merge_call(merge_fn, x, scale=10.0)
        assert distribute.get_tower_context() == here
        return total + x

    total = 10.0 * sum(case.numbers)
    expected = [total + number for number in case.numbers]
    case.expect(case.towers(tower_fn), distribute.PerDevice, expected)


def test_merge_call_without_a_strategy() -> None:
    """The default tower merges with itself alone."""

    def merge_fn(distribution: Any, x: Any) -> Any:
        assert distribution is distribute.get_cross_tower_context()
        assert not distribute.has_distribution_strategy()
        return distribution.reduce("mean", x)

    step = dx.function(lambda x: tower().merge_call(merge_fn, x) + 1)
    assert float(step(2.0)) == 3.0
    assert tower().merge_call(functools.partial(merge_fn), 2.0) == 2.0


def _first_id(tower_id: int) -> int:
    return tower().merge_call(lambda distribution: tower_id)


def test_towers_must_meet_in_the_same_call(pair: distribute.MirroredStrategy) -> None:
    def tower_fn() -> None:
        if tower().tower_id == 0:
            tower().merge_call(lambda d: d.num_towers)
        else:
            tower().merge_call(lambda d: d.worker_devices)

    with pair.scope():
        with pytest.raises(RuntimeError, match=r"meet in different calls.*<lambda>"):
            pair.call_for_each_tower(tower_fn)
        # The same code with other values closed over is the same call.
        assert pair.call_for_each_tower(lambda: _first_id(tower().tower_id)) == 0


def test_a_tower_context_is_entered_and_left(pair: distribute.MirroredStrategy) -> None:
    outside = tower()
    with pair.scope():
        assert distribute.get_tower_context() is None
        with outside as entered:
            assert distribute.get_tower_context() == entered == outside
        assert distribute.get_tower_context() is None


def test_a_tower_context_is_not_used_outside_its_tower(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        kept = pair.unwrap(pair.call_for_each_tower(tower))[1]
    assert kept != tower()
    for use in (
        lambda: kept.tower_id,
        lambda: kept.device,
        lambda: kept.merge_call(lambda distribution: None),
    ):
        with pytest.raises(RuntimeError, match="not the current one"):
            use()


# unwrap and group


def test_unwrap_and_group(small: Case) -> None:
    v = small.variable(2.0)
    t = small.towers(tower_number)
    with small.d.scope():
        assert isinstance(small.d.unwrap(t), list)
        assert small.d.unwrap("plain") == ["plain"]
        assert len(small.d.unwrap(v)) == len(small.d.parameter_devices)
        assert small.d.group(t) is None
        assert small.d.group([t, v], name="train_op") is None


def test_the_copies_of_a_variable_in_a_step_are_those_of_now(case: Case) -> None:
    v = case.variable(1.0)

    def step() -> Any:
        v.assign_add(1.0)
        return sum(copy.read_value() for copy in case.d.unwrap(v))

    count = len(case.d.parameter_devices)
    with case.d.scope():
        run = case.step(step)
        assert [float(run()) for _ in range(3)] == [2.0 * count, 3.0 * count, 4.0 * count]

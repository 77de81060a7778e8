"""Which strategy and which replica the running code belongs to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, device, make_strategy


def _state() -> tuple[Any, bool, bool, bool]:
    """Returns who is in charge of the code that runs now."""
    return (
        dx.get_strategy(),
        dx.has_strategy(),
        dx.in_cross_replica_context(),
        dx.get_replica_context() is None,
    )


DEFAULT = (make_strategy("default", 1), False, False, False)


def _in_scope(strategy: Any) -> tuple[Any, bool, bool, bool]:
    """Returns the state in a strategy's scope; the default one has no other than its replica's."""
    return DEFAULT if strategy is DEFAULT[0] else (strategy, True, True, True)


@pytest.fixture
def set_strategy() -> Iterator[Callable[[Any], None]]:
    yield dx.experimental_set_strategy
    dx.experimental_set_strategy(None)


def test_nothing_in_scope_is_the_default_replica() -> None:
    assert _state() == DEFAULT
    context = dx.get_replica_context()
    assert context.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0
    assert context.strategy is dx.get_strategy()


def test_scope_is_the_cross_replica_context(strategy: Any) -> None:
    with strategy.scope() as entered:
        assert entered is strategy
        assert _state() == _in_scope(strategy)
    assert _state() == DEFAULT


def test_a_replica_knows_its_place(case: Case) -> None:
    seen: list[Any] = []

    def replica_fn() -> Any:
        context = dx.get_replica_context()
        seen.append((*_state(), context.num_replicas_in_sync, context.strategy))
        return context.replica_id_in_sync_group

    ids = case.run(replica_fn)
    assert case.numbers(ids) == list(range(case.num_replicas))
    strategy = case.strategy
    has_strategy = case.kind != "default"
    assert set(seen) == {(strategy, has_strategy, False, False, case.num_replicas, strategy)}
    assert _state() == DEFAULT


def test_merge_call_is_the_cross_replica_context(case: Case) -> None:
    seen: list[Any] = []
    case.run(lambda: dx.get_replica_context().merge_call(lambda strategy: seen.append(_state())))
    assert set(seen) == {(case.strategy, case.kind != "default", True, True)}


def test_update_is_not_a_replica(case: Case) -> None:
    variable = case.variable(1.0)
    seen: list[Any] = []
    case.across(lambda: case.strategy.extended.update(variable, lambda v: seen.append(_state())))
    assert set(seen) == {(case.strategy, case.kind != "default", True, True)}


def test_scopes_of_one_strategy_nest(strategy: Any) -> None:
    with strategy.scope():
        with strategy.scope():
            assert dx.get_strategy() is strategy
        assert _state() == _in_scope(strategy)
    assert _state() == DEFAULT


def test_a_scope_inside_another_strategy_is_refused(strategy: Any) -> None:
    other = dx.OneDeviceStrategy(device(2))
    with strategy.scope():
        before = _state()
        with (
            pytest.raises(RuntimeError, match=r"OneDeviceStrategy cannot be entered inside"),
            other.scope(),
        ):
            pytest.fail("entered")
        assert _state() == before
    assert _state() == DEFAULT


def test_a_scope_inside_a_replica_is_refused(scoped: Case) -> None:
    def replica_fn() -> None:
        with scoped.strategy.scope():
            pytest.fail("entered")

    with pytest.raises(RuntimeError, match=r"running a replica here.*merge_call"):
        scoped.run(replica_fn)


def test_an_exception_leaves_the_scope(strategy: Any) -> None:
    with pytest.raises(KeyError, match="mine"), strategy.scope():
        raise KeyError("mine")
    assert _state() == DEFAULT


def test_a_scope_belongs_to_its_thread(strategy: Any) -> None:
    seen: list[Any] = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(_state()))
        thread.start()
        thread.join(300)
    assert seen == [DEFAULT]


def test_set_strategy_makes_a_strategy_current(
    strategy: Any, set_strategy: Callable[[Any], None]
) -> None:
    set_strategy(strategy)
    assert _state() == _in_scope(strategy)
    with strategy.scope():
        assert dx.get_strategy() is strategy
    assert dx.Variable(1.0).distribute_strategy is strategy
    set_strategy(None)
    assert _state() == DEFAULT


def test_set_strategy_is_replaced_by_the_next(
    pair: Any, set_strategy: Callable[[Any], None]
) -> None:
    other = dx.OneDeviceStrategy(device(2))
    set_strategy(other)
    set_strategy(pair)
    assert dx.get_strategy() is pair
    with (
        pytest.raises(RuntimeError, match=r"experimental_set_strategy\(None\)"),
        other.scope(),
    ):
        pytest.fail("entered")


def test_what_is_no_strategy_is_not_set() -> None:
    with pytest.raises(TypeError, match=r"strategy=5 is not a strategy\. Pass one"):
        dx.experimental_set_strategy(5)  # type: ignore[arg-type]


def test_set_strategy_inside_a_scope_is_refused(pair: Any) -> None:
    with pair.scope(), pytest.raises(RuntimeError, match=r"experimental_set_strategy.*scope\(\)"):
        dx.experimental_set_strategy(None)


def test_set_strategy_is_seen_by_its_thread_alone(
    pair: Any, set_strategy: Callable[[Any], None]
) -> None:
    seen: list[Any] = []
    set_strategy(pair)
    thread = threading.Thread(target=lambda: seen.append(_state()))
    thread.start()
    thread.join(300)
    assert seen == [DEFAULT]


CROSS_REPLICA_CALLS: dict[str, Callable[[Any], Any]] = {
    "strategy.run": lambda s: s.run(lambda: None),
    "strategy.reduce": lambda s: s.reduce("MEAN", 1.0, axis=None),
    "strategy.gather": lambda s: s.gather(jnp.ones(1), axis=0),
    "reduce_to": lambda s: s.extended.reduce_to("MEAN", 1.0, None),
    "broadcast_to": lambda s: s.extended.broadcast_to(1.0),
    "update_non_slot": lambda s: s.extended.update_non_slot(["CPU:0"], lambda: None),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(lambda: None),
    "experimental_distribute_values_from_function": lambda s: (
        s.experimental_distribute_values_from_function(lambda context: 1.0)
    ),
}


@pytest.mark.parametrize("name", CROSS_REPLICA_CALLS)
def test_cross_replica_calls_are_refused_in_a_replica(small: Case, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}: needs the cross-replica context"):
        small.run(lambda: CROSS_REPLICA_CALLS[name](small.strategy))


@pytest.mark.parametrize("name", CROSS_REPLICA_CALLS)
def test_cross_replica_calls_are_refused_in_another_scope(pair: Any, name: str) -> None:
    own = type(pair).__name__
    with (
        dx.OneDeviceStrategy(device(1)).scope(),
        pytest.raises(RuntimeError, match=rf"{name}: called on {own} inside the scope"),
    ):
        CROSS_REPLICA_CALLS[name](pair)


def test_update_is_refused_in_another_scope(pair: Any) -> None:
    with pair.scope():
        variable = dx.Variable(1.0)
    with (
        dx.OneDeviceStrategy(device(1)).scope(),
        pytest.raises(RuntimeError, match=rf"update: called on {type(pair).__name__}"),
    ):
        pair.extended.update(variable, lambda v: None)


def test_everything_works_outside_any_scope(case: Case) -> None:
    strategy = case.strategy
    variable = case.variable([1.0, 2.0])
    value = case.each(lambda index: jnp.full((2,), float(index)))
    total = sum(range(case.num_replicas))

    def across(value: Any) -> Any:
        strategy.extended.update(variable, lambda v: v.assign_add([1.0, 1.0]))
        return strategy.reduce("SUM", value, axis=None), strategy.gather(value, axis=0)

    reduced, gathered = case.step(across)(value)
    assert reduced.tolist() == [total, total]
    assert gathered.shape == (2 * case.num_replicas,)
    assert variable.numpy().tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("merge_call", lambda c: c.merge_call(lambda strategy: None)),
        ("all_reduce", lambda c: c.all_reduce("SUM", 1.0)),
        ("all_gather", lambda c: c.all_gather(jnp.ones(1), axis=0)),
        ("replica_id_in_sync_group", lambda c: c.replica_id_in_sync_group),
        ("devices", lambda c: c.devices),
    ],
)
def test_a_replica_context_is_of_no_use_later(small: Case, name: str, call: Any) -> None:
    kept: list[Any] = []
    small.run(lambda: kept.append(dx.get_replica_context()))
    with pytest.raises(RuntimeError, match=rf"{name}: this replica context .* is not the current"):
        call(kept[0])


def test_a_replica_context_can_be_entered_again(case: Case) -> None:
    def replica_fn() -> Any:
        context = dx.get_replica_context()
        with context as entered:
            assert entered is context is dx.get_replica_context()
            return context.all_reduce("SUM", jnp.asarray(1.0))

    assert case.numbers(case.run(replica_fn)) == [case.num_replicas] * case.num_replicas


def test_reprs_tell_what_it_is(case: Case) -> None:
    texts: list[str] = []
    case.run(lambda: texts.append(repr(dx.get_replica_context())))
    name = type(case.strategy).__name__
    assert set(texts) == {f"<distribax.ReplicaContext of {name}>"}
    count = "1 replica" if case.num_replicas == 1 else f"{case.num_replicas} replicas"
    assert repr(case.strategy).startswith(f"<dx.{name} of {count} on /job:")


def test_devices_have_full_names(case: Case) -> None:
    job = "worker" if case.kind == "served" else "localhost"
    prefix = f"/job:{job}/replica:0/task:{jax.process_index()}/device:CPU:"
    extended = case.strategy.extended
    first = 1 if case.kind == "one_device" else 0
    workers = tuple(f"{prefix}{first + index}" for index in range(len(case.replicas)))
    elsewhere = {"central": f"{prefix}5", "served": "/job:ps/replica:0/task:0/device:CPU:0"}
    parameters = (elsewhere[case.kind],) if case.kind in elsewhere else workers
    assert extended.worker_devices == workers
    assert extended.parameter_devices == parameters
    devices: list[Any] = []
    case.run(lambda: devices.append(dx.get_replica_context().devices))
    assert {name for names in devices for name in names} == set(workers)


def test_loss_reduction_is_a_sum() -> None:
    assert dx.get_loss_reduction() is dx.ReduceOp.SUM


def test_a_run_leaves_the_scope_as_it_was(case: Case) -> None:
    with case.strategy.scope():
        before = _state()
        case.run(lambda: None)
        assert _state() == before

"""What goes wrong in a replica reaches the caller, and the strategy stays usable."""

from __future__ import annotations

import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, replica_number, replicas_of
from tests.multidevice.contract.other_workers import TOGETHER


class Mine(Exception):
    pass


def _still_works(case: Case) -> None:
    n = case.num_replicas
    result = case.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(())))
    assert case.numbers(result) == [n] * n
    assert not [t for t in threading.enumerate() if t.name.startswith("distribax-replica")]


def _is_local(index: int, case_or_strategy: Any) -> bool:
    """Tells whether this replica is the one with that index among those of its process."""
    strategy = getattr(case_or_strategy, "strategy", case_or_strategy)
    own = dx.get_replica_context().replica_id_in_sync_group
    return own == replicas_of(strategy)[index % len(replicas_of(strategy))]


def _needs_two(strategy: Any) -> None:
    """Skips a test of replicas that wait for others of their process, where there are none."""
    if len(replicas_of(strategy)) == 1:
        pytest.skip("each worker has one replica, and none that could wait for it in vain here")


def test_an_exception_keeps_its_type(case: Case) -> None:
    def replica_fn() -> None:
        raise Mine("mine")

    for _ in range(2):
        with pytest.raises(Mine, match="mine"):
            case.run(replica_fn)
    _still_works(case)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_replica_fails(eager: Case, failing: int) -> None:
    """The others wait in vain, at a meeting that never happens."""

    def replica_fn() -> Any:
        if _is_local(failing, eager):
            raise Mine("mine")
        return dx.get_replica_context().all_reduce("SUM", jnp.ones(()))

    with pytest.raises(Mine, match="mine"):
        eager.run(replica_fn)
    _still_works(eager)


def test_a_merge_function_fails(case: Case) -> None:
    def merge_fn(strategy: Any) -> None:
        raise Mine("mine")

    with pytest.raises(Mine, match="mine"):
        case.run(lambda: dx.get_replica_context().merge_call(merge_fn))
    _still_works(case)


def test_replicas_that_give_up_are_unwound(pair: Any) -> None:
    """A replica's `finally` runs, and its `except Exception` does not see the others' failure."""
    _needs_two(pair)
    events: list[str] = []

    def replica_fn() -> None:
        if _is_local(1, pair):
            raise Mine("mine")
        try:
            dx.get_replica_context().all_reduce("SUM", jnp.ones(()))
        except Exception:
            events.append("swallowed")
        finally:
            events.append("finally")

    with pytest.raises(Mine, match="mine"):
        pair.run(replica_fn)
    assert events == ["finally"]


@pytest.mark.parametrize("meets", [0, 1])
def test_replicas_that_do_not_meet(eager: Case, meets: int) -> None:
    """Some replicas call `all_reduce` and some do not: an error, and no hang."""
    _needs_two(eager.strategy)

    def replica_fn() -> Any:
        context = dx.get_replica_context()
        total = context.all_reduce("SUM", jnp.ones(()))
        if _is_local(0, eager) == bool(meets):
            total = context.all_reduce("SUM", total)
        return total

    with pytest.raises(RuntimeError, match=r"replicas \[.*\] wait in merge_call.*have ended.*same"):
        eager.run(replica_fn)
    _still_works(eager)


def test_replicas_that_meet_in_different_calls(pair: Any) -> None:
    _needs_two(pair)

    def replica_fn() -> Any:
        context = dx.get_replica_context()
        if _is_local(0, pair):
            return context.merge_call(lambda strategy, x: x, args=(1,))
        return context.all_reduce("SUM", jnp.ones(()))

    with pytest.raises(RuntimeError, match=r"the replicas meet in different calls.*same order"):
        pair.run(replica_fn)
    assert pair.run(lambda: 5) == 5


def test_writes_that_do_not_meet(pair: Any) -> None:
    _needs_two(pair)
    with pair.scope():
        variable = dx.Variable(1.0, aggregation="SUM")

    def replica_fn() -> None:
        if _is_local(0, pair):
            variable.assign(replica_number())

    with pytest.raises(RuntimeError, match=r"wait in merge_call"):
        pair.run(replica_fn)
    assert float(variable) == 1.0


def test_replicas_run_in_turn(pair: Any) -> None:
    """Eager replicas take turns, so that a run is the same every time."""
    order: list[Any] = []

    def replica_fn() -> None:
        context = dx.get_replica_context()
        for part in range(2):
            order.append((part, context.replica_id_in_sync_group))
            context.merge_call(lambda strategy: order.append("met"))

    pair.run(replica_fn)
    own = replicas_of(pair)
    assert order == [*((0, index) for index in own), "met", *((1, index) for index in own), "met"]


def test_a_step_can_be_interrupted(pair: Any) -> None:
    def replica_fn() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.run(replica_fn)
    assert pair.run(lambda: 5) == 5


def test_runs_of_several_threads_do_not_mix(several: Case) -> None:
    if TOGETHER:
        pytest.skip("threads take turns in another order in each worker, and meet the wrong ones")
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        for _ in range(3):
            value = several.run(
                lambda: dx.get_replica_context().all_reduce("SUM", jnp.full((2,), float(index)))
            )
            results[index] = np.asarray(value).tolist()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    n = several.num_replicas
    assert results == {index: [float(index * n)] * 2 for index in range(3)}

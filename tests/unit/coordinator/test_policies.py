"""How much a worker is given at a time, and what is decided when one fails."""

from __future__ import annotations

import math

from distribax.coordinator.batch_sizing import BATCH_SECONDS, MAX_BATCH, MAX_BATCH_BYTES, BatchSizer
from distribax.coordinator.closure_queue import Closure, ClosureQueue
from distribax.coordinator.failure_policy import FailureDecision, FailurePolicy
from tests.unit.coordinator.closures import closure


def some(count: int, name: str = "fn", arguments: bytes | None = None) -> list[Closure]:
    queue = ClosureQueue(1)
    return [closure(queue, name, arguments) for _ in range(count)]


def test_an_unknown_function_is_tried_alone() -> None:
    sizer = BatchSizer()
    sizer.learn("known", 10, 0.001)
    assert sizer.choose_batch(iter(some(9)), most=9) == 1
    assert sizer.choose_batch(iter(some(3, "known") + some(9)), most=99) == 3
    assert sizer.estimate_seconds(some(1)) == math.inf


def test_a_batch_makes_up_for_a_call_of_ray() -> None:
    sizer = BatchSizer()
    sizer.learn("fn", 2, 2 * BATCH_SECONDS / 7.5)
    assert sizer.choose_batch(iter(some(100)), most=100) == 7
    assert sizer.choose_batch(iter(some(100)), most=3) == 3
    assert sizer.choose_batch(iter(some(2)), most=100) == 2
    assert math.isclose(sizer.estimate_seconds(some(5)), 5 * BATCH_SECONDS / 7.5)
    sizer.learn("slow", 1, 2.0)
    assert sizer.choose_batch(iter(some(5, "slow")), most=5) == 1


def test_workers_are_given_what_lets_them_end_together() -> None:
    sizer = BatchSizer()
    sizer.learn("fn", 1, 0.01)
    (first,) = some(1)
    assert sizer.choose_count(first, 20, [0.0, 0.0]) == 10
    # This worker has 0.1 s less to do than the other one, which is worth ten closures.
    assert sizer.choose_count(first, 20, [0.1, 0.2]) == 15
    assert sizer.choose_count(first, 5, [0.1, 0.3]) == 12
    assert sizer.choose_count(first, 5, [0.3, 0.1]) == 0
    assert sizer.choose_batch(iter(some(5)), most=0) == 0
    # Who has nothing to do is not left without.
    assert sizer.choose_count(first, 1, [0.0, 0.0, 0.0]) == 1


def test_work_that_cannot_be_estimated_is_shared_evenly() -> None:
    sizer = BatchSizer()
    (unknown,) = some(1)
    assert sizer.choose_count(unknown, 5, [0.0, 0.1]) == 3
    sizer.learn("fn", 1, 0.0)
    assert sizer.choose_count(unknown, 5, [0.0, 0.1]) == 3
    sizer.learn("fn", 1, 1.0)
    assert sizer.choose_count(unknown, 5, [0.0, math.inf]) == 3


def test_a_batch_has_bounds() -> None:
    sizer = BatchSizer()
    sizer.learn("fn", 1, 0.0)
    assert sizer.choose_batch(iter(some(3 * MAX_BATCH)), most=10 * MAX_BATCH) == MAX_BATCH
    large = some(5, arguments=bytes(MAX_BATCH_BYTES // 2))
    assert sizer.choose_batch(iter(large), most=5) == 2


def test_what_was_lost_again_and_again_is_sent_alone() -> None:
    sizer = BatchSizer()
    sizer.learn("fn", 1, 0.0)
    closures = some(4)
    closures[2].losses = 3
    assert sizer.choose_batch(iter(closures), most=4) == 2
    assert sizer.choose_batch(iter(closures[2:]), most=2) == 1


def test_estimates_fall_at_once_and_rise_slowly() -> None:
    sizer = BatchSizer()
    sizer.learn("fn", 1, 1.0)
    sizer.learn("fn", 1, 0.1)
    assert math.isclose(sizer.estimate_seconds(some(1)), 0.1)
    sizer.learn("fn", 1, 1.1)
    assert math.isclose(sizer.estimate_seconds(some(1)), 0.4)


def test_decisions() -> None:
    policy = FailurePolicy(worker_timeout=8.0, all_workers_timeout=30.0)
    assert policy.ping_seconds == 1.0
    assert policy.on_silence(7.0, has_been_heard=True) is FailureDecision.WAIT
    assert policy.on_silence(9.0, has_been_heard=True) is FailureDecision.REPLACE
    assert policy.on_silence(9.0, has_been_heard=False) is FailureDecision.WAIT
    assert policy.on_silence(31.0, has_been_heard=False) is FailureDecision.REPLACE
    assert policy.on_loss(9) is FailureDecision.RETRY
    assert policy.on_loss(10) is FailureDecision.RAISE
    assert policy.on_no_worker(29.0, start_failures=2) is FailureDecision.WAIT
    assert policy.on_no_worker(31.0, start_failures=0) is FailureDecision.RAISE
    assert policy.on_no_worker(0.0, start_failures=3) is FailureDecision.RAISE
    assert [policy.on_start_failure(count) for count in (1, 2, 3)] == [
        FailureDecision.RETRY,
        FailureDecision.RETRY,
        FailureDecision.REPLACE,
    ]
    pauses = [policy.choose_start_pause(count) for count in (0, 1, 2, 10)]
    assert pauses == [0.2, 0.4, 0.8, 5.0]

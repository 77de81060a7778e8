"""The closure queue: order, back-pressure, errors, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distribax.coordinator import ClosureCancelledError, RemoteValue, RemoteValueStatus
from distribax.coordinator import closure_queue as queues
from distribax.coordinator.closure_queue import Closure, ClosureQueue
from distribax.coordinator.outcomes import ClosureFailure
from tests.unit.coordinator.closures import closure, put, take


class Waiter:
    """Calls something in a thread, and tells what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    @property
    def waits(self) -> bool:
        self._thread.join(0.1)
        return self._thread.is_alive()

    def ended(self) -> BaseException | None:
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.error


def test_closures_come_out_in_order_and_those_given_back_come_first() -> None:
    queue = ClosureQueue(10)
    made = put(queue, 4)
    first = take(queue, 3)
    assert first == made[:3]
    queue.give_back(first[1:], retry=True)
    assert take(queue, 9) == made[1:]
    counts = queue.count()
    assert (counts.scheduled, counts.queued, counts.running, counts.retried) == (4, 0, 4, 2)


def test_the_dispatcher_is_woken_when_it_has_found_nothing() -> None:
    woken: list[int] = []
    queue = ClosureQueue(10, lambda: woken.append(1))
    put(queue, 1)
    assert woken == []
    take(queue, 1)
    assert take(queue, 1) == []
    put(queue, 2)
    assert woken == [1]


def test_values_are_settled_and_waited_for() -> None:
    queue = ClosureQueue(10)
    one, two = put(queue, 2)
    assert repr(one.value) == "<RemoteValue, not ready>"
    joined, fetched = Waiter(queue.join), Waiter(one.value.fetch)
    taken = take(queue, 2)
    assert joined.waits and fetched.waits and not queue.done()
    queue.settle(taken, ["a", "b"])
    assert joined.ended() is None and fetched.ended() is None
    assert (one.value.fetch(), two.value.fetch()) == ("a", "b")
    assert queue.done() and queue.count().finished == 2


def test_a_full_queue_makes_its_user_wait() -> None:
    queue = ClosureQueue(2)
    put(queue, 2)
    waiter = Waiter(lambda: put(queue, 1))
    assert waiter.waits
    take(queue, 1)
    assert waiter.ended() is None
    assert queue.count().queued == 2


def test_too_many_bytes_make_their_user_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MAX_BYTES", 10)
    queue = ClosureQueue(100)
    put(queue, 2, arguments=b"123456")
    waiter = Waiter(lambda: put(queue, 1, arguments=b"1"))
    assert waiter.waits
    queue.give_back(take(queue, 1))
    assert waiter.waits
    take(queue, 1)
    assert waiter.ended() is None


@pytest.mark.parametrize("use", ["put", "join", "done"])
def test_an_error_waits_for_what_runs_and_is_raised_once(use: str) -> None:
    queue = ClosureQueue(10)
    running, failing, waiting = put(queue, 3)
    take(queue, 2)
    error = ValueError("bad")
    queue.settle([failing], [ClosureFailure(error)])
    assert queue.has_error
    uses: dict[str, Callable[[], Any]] = {
        "put": lambda: put(queue, 1),
        "join": queue.join,
        "done": queue.done,
    }
    told = Waiter(uses[use])
    assert told.waits
    assert waiting.value.status is running.value.status is RemoteValueStatus.ABORTED
    queue.settle([running], [5])
    assert told.ended() is error
    assert queue.count().cancelled == 2
    with pytest.raises(ClosureCancelledError, match="while it was running: ValueError: bad"):
        running.value.fetch()
    with pytest.raises(ValueError, match="bad"):
        failing.value.fetch()
    with pytest.raises(ClosureCancelledError, match="ValueError: bad") as caught:
        waiting.value.fetch()
    assert caught.value.__cause__ is error
    assert queue.done()
    queue.join()
    put(queue, 1)
    assert len(take(queue, 5)) == 1


def test_an_error_reaches_who_waits_for_room() -> None:
    queue = ClosureQueue(1)
    put(queue, 1)
    (running,) = take(queue, 1)
    put(queue, 1)
    waiter = Waiter(lambda: put(queue, 1))
    assert waiter.waits
    queue.settle([running], [ClosureFailure(KeyError("k"))])
    assert isinstance(waiter.ended(), KeyError)


def test_nothing_is_given_out_and_what_comes_back_is_cancelled_after_an_error() -> None:
    queue = ClosureQueue(10)
    one, two, _ = put(queue, 3)
    take(queue, 2)
    queue.fail(OSError("gone"))
    assert take(queue, 1) == []
    queue.give_back([one, two], retry=True)
    counts = queue.count()
    assert (counts.cancelled, counts.running, counts.queued) == (3, 0, 0)
    with pytest.raises(OSError, match="gone"):
        queue.join()


def test_only_the_first_of_several_errors_is_raised() -> None:
    queue = ClosureQueue(10)
    both = put(queue, 2)
    take(queue, 2)
    queue.settle(both, [ClosureFailure(ValueError("first")), ClosureFailure(ValueError("second"))])
    with pytest.raises(ValueError, match="first"):
        queue.join()
    queue.join()
    with pytest.raises(ValueError, match="second"):
        both[1].value.fetch()


def test_a_closure_waits_for_the_values_that_it_needs() -> None:
    queue = ClosureQueue(10)
    first, second = put(queue, 2)
    dependent = closure(queue, needs=(first.value, second.value))
    queue.put(dependent)
    assert take(queue, 9) == [first, second]
    queue.settle([first], [1])
    assert take(queue, 9) == []
    assert queue.count().queued == 1 and not queue.done()
    queue.settle([second], [2])
    assert take(queue, 9) == [dependent]
    queue.settle([dependent], [3])
    assert queue.done()


def test_closures_that_need_a_failed_value_fail_with_it() -> None:
    queue = ClosureQueue(10)
    first, other = put(queue, 2)
    dependents = [closure(queue, needs=(first.value,)) for _ in range(2)]
    for each in dependents:
        queue.put(each)
    take(queue, 2)
    queue.settle([first, other], [ClosureFailure(ValueError("bad")), 2])
    for each in dependents:
        with pytest.raises(ValueError, match="bad"):
            each.value.fetch()
    with pytest.raises(ValueError, match="bad"):
        queue.join()
    assert queue.done()
    late = closure(queue, needs=(first.value,))
    queue.put(late)
    with pytest.raises(ValueError, match="bad"):
        late.value.fetch()
    with pytest.raises(ValueError, match="bad"):
        queue.done()
    assert queue.count().failed == 4


def test_closures_that_become_ready_after_an_error_are_cancelled() -> None:
    queue = ClosureQueue(10)
    good, bad = put(queue, 2)
    dependents = [
        closure(queue, needs=(good.value, bad.value)),
        closure(queue, needs=(good.value,)),
    ]
    for each in dependents:
        queue.put(each)
    take(queue, 2)
    # The first of them finds a failed value when the good one is there; the second is ready then.
    bad.value.set_error(ValueError("bad"))
    queue.settle([good], [1])
    with pytest.raises(ValueError, match="bad"):
        dependents[0].value.fetch()
    with pytest.raises(ClosureCancelledError):
        dependents[1].value.fetch()
    assert queue.count().queued == 0


def test_an_ended_queue_lets_nobody_wait() -> None:
    queue = ClosureQueue(1)
    (lost,) = put(queue, 1)
    take(queue, 1)
    waiters = [Waiter(queue.join), Waiter(lost.value.fetch)]
    assert all(waiter.waits for waiter in waiters)
    queue.end("it was closed")
    queue.end("again")
    assert "it was closed" in str(waiters[0].ended())
    assert isinstance(waiters[1].ended(), ClosureCancelledError)
    for use in (queue.join, queue.done, lambda: put(queue, 1)):
        with pytest.raises(RuntimeError, match="ClusterCoordinator: it was closed"):
            use()
    never = RemoteValue(queue)
    with pytest.raises(ClosureCancelledError, match="it was closed"):
        never.fetch()


def test_join_does_something_else_now_and_then() -> None:
    beats: list[int] = []

    def beat() -> None:
        beats.append(1)
        if len(beats) == 2:
            queue.settle([only], [None])

    queue = ClosureQueue(10, beat=beat)
    (only,) = put(queue, 1)
    take(queue, 1)
    assert not queue.done()
    queue.join()
    assert len(beats) >= 2


class QueueMachine(RuleBasedStateMachine):
    """Any order of events settles every closure once, and the counts add up."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ClosureQueue(1000)
        self.all: list[Closure] = []
        self.running: list[Closure] = []

    @rule(needs=st.lists(st.integers(0, 50), max_size=2))
    def put(self, needs: list[int]) -> None:
        values = tuple(self.all[n % len(self.all)].value for n in needs if self.all)
        made = closure(self.queue, needs=values)
        if self.queue.has_error:
            if self.running:
                return  # It would wait.
            with pytest.raises((ValueError, ClosureCancelledError), match="bad"):
                self.queue.put(made)
        else:
            self.queue.put(made)
            self.all.append(made)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        self.running += take(self.queue, count)

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 4), retry=st.booleans())
    def give_back(self, count: int, retry: bool) -> None:
        back, self.running = self.running[:count], self.running[count:]
        self.queue.give_back(back, retry=retry)

    @precondition(lambda self: self.running)
    @rule(outcomes=st.lists(st.booleans(), min_size=1, max_size=4))
    def settle(self, outcomes: list[bool]) -> None:
        ended, self.running = self.running[: len(outcomes)], self.running[len(outcomes) :]
        made = [1 if good else ClosureFailure(ValueError("bad")) for good in outcomes[: len(ended)]]
        self.queue.settle(ended, made)

    @precondition(lambda self: self.queue.has_error and not self.running)
    @rule()
    def be_told(self) -> None:
        with pytest.raises((ValueError, ClosureCancelledError), match="bad"):
            self.queue.done()

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.queue.count()
        # What ran when another one failed is settled, but runs until its worker has answered.
        ended = [e for e in self.all if e.value.is_settled and e not in self.running]
        assert counts.scheduled == len(self.all)
        assert counts.finished + counts.failed + counts.cancelled == len(ended)
        assert counts.queued + counts.running == len(self.all) - len(ended)
        assert counts.running == len(self.running)
        assert self.queue.has_error or not any(e.value.is_settled for e in self.running)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

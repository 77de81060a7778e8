"""The dispatcher: how it ends by a mistake, and what it does about lost workers."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from distribax.cluster.ray import ray_session
from distribax.coordinator import ClosureCancelledError, WorkersLostError
from distribax.coordinator.closure_queue import ClosureState
from distribax.coordinator.dispatcher import Dispatcher
from distribax.coordinator.failure_policy import FailurePolicy
from distribax.coordinator.messages import Greeting, Pulse
from distribax.coordinator.status import WorkerState
from distribax.coordinator.work_display import WorkDisplay
from distribax.coordinator.worker_handle import SentBatch, WorkerHandle
from tests.unit.coordinator.closures import put, take


class Broken(WorkerHandle):
    """A worker that cannot even be asked to start."""

    def start(self, answer: Any) -> None:
        raise ZeroDivisionError("a mistake")

    def end(self) -> None:
        """There is no process."""


class Absent(Broken):
    """A worker that never answers."""

    def start(self, answer: Any) -> None:
        """There is no process."""


def make_dispatcher(worker: WorkerHandle) -> Dispatcher:
    hide = lambda index, text: None  # noqa: E731
    return Dispatcher(4, [worker], FailurePolicy(), lambda: (), WorkDisplay().update, list, hide)


def test_a_mistake_is_told_to_users_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", noticed.append)
    dispatcher = make_dispatcher(Broken(0, {}, b""))
    (waiting,) = put(dispatcher.queue, 1)
    dispatcher.open()
    with pytest.raises(RuntimeError, match="a mistake of distribax, ZeroDivisionError"):
        dispatcher.queue.join()
    with pytest.raises(ClosureCancelledError, match="a mistake of distribax"):
        waiting.value.fetch()
    dispatcher.close()
    assert [each.exc_type for each in noticed] == [ZeroDivisionError]


def test_a_lost_worker_and_its_functions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerHandle(3, {}, b"")
    dispatcher = make_dispatcher(worker)
    (closure,) = put(dispatcher.queue, 1)
    with caplog.at_level(logging.INFO, "distribax.coordinator"):
        worker.become_ready(Greeting("boot", 42, "here"))
        worker.batches[1] = SentBatch(take(dispatcher.queue, 1), {}, 1.0)
        assert closure.state is ClosureState.RUNNING
        dispatcher._lose(worker, "its process has died")
        # Ray is still restarting it: that is not said again and again.
        dispatcher._lose(worker, "its process has died")
        worker.become_ready(Greeting("another", 43, "here"))
    assert closure.state is ClosureState.QUEUED and dispatcher.queue.count().retried == 1
    assert caplog.messages == [
        "Worker 3 has started as process 42 on here.",
        "Worker 3 is lost: its process has died. It is restarted.",
        "Functions that are retried as worker 3 is lost: 1.",
        "Worker 3 has been restarted as process 43 on here.",
    ]


def test_a_worker_that_is_replaced_between_two_pings_is_lost() -> None:
    worker = WorkerHandle(0, {}, b"")
    dispatcher = make_dispatcher(worker)
    worker.become_ready(Greeting("boot", 42, "here"))
    dispatcher._on_pulse(worker, Pulse(0, 0, "boot"))
    assert worker.state is WorkerState.READY
    dispatcher._on_pulse(worker, Pulse(0, 0, "another"))
    assert worker.state is WorkerState.LOST
    # The new process answers while it is not known yet.
    dispatcher._on_pulse(worker, Pulse(0, 0, "another"))
    worker.become_ready(Greeting("another", 43, "here"))
    dispatcher._on_pulse(worker, Pulse(0, 0, "another"))
    assert worker.state is WorkerState.READY


def test_workers_have_their_time_from_when_ray_was_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs: list[int | None] = [0]
    monkeypatch.setattr(ray_session, "get_epoch", lambda: epochs[-1])
    dispatcher = make_dispatcher(Absent(0, {}, b""))
    put(dispatcher.queue, 1)
    now = time.monotonic()
    for epoch in (0, None, 1):
        epochs.append(epoch)
        for _ in range(100):  # 50 of the 60 s that workers have.
            now += 0.5
            dispatcher._watch(now)
    assert not dispatcher.queue.has_error
    for _ in range(40):
        now += 0.5
        dispatcher._watch(now)
    with pytest.raises(WorkersLostError, match=r"no worker for 60\.5 s"):
        dispatcher.queue.join()

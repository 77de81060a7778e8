"""A worker without Ray: batches, their limits, recalls, refusals."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from distribax.coordinator import experimental_get_current_worker_index, references, worker
from distribax.coordinator.messages import ClosureBatch, Greeting, Pulse, Reply, SentDefinition
from distribax.coordinator.outcomes import Raised
from distribax.coordinator.references import DefinitionKind
from distribax.coordinator.worker import LONGEST_SECONDS, Worker
from distribax.errors import ParameterServerUnreachableError


class Setup:
    """A strategy without a scope, which can be told to fail."""

    fails = False

    def start(self, worker_index: int) -> Setup:
        if worker_index == 13:
            raise OSError("no server")
        return self

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def flush(self) -> None:
        if Setup.fails:
            raise ConnectionError("no answer")

    def check_servers(self) -> None:
        self.flush()


@pytest.fixture(autouse=True)
def _this_process_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.setattr(Setup, "fails", False)
    monkeypatch.setattr(references, "_lookup", None)
    monkeypatch.setattr(worker, "_worker_index", None)


class Driver:
    """Sends batches to a worker."""

    def __init__(self) -> None:
        self.worker = Worker()
        greeting = self.worker.start(0, pickle.dumps(Setup()))
        assert isinstance(greeting, Greeting)
        self.boot = greeting.boot
        self.number = 0

    def run(self, *calls: Callable[[], Any], number: int | None = None) -> Reply:
        self.number = self.number + 1 if number is None else number
        definitions = tuple(
            SentDefinition(
                100 * self.number + index, DefinitionKind.OBJECT, "fn", cloudpickle.dumps(call)
            )
            for index, call in enumerate(calls)
        )
        functions = [each.number for each in definitions]
        batch = ClosureBatch(
            self.number, self.boot, definitions, (), functions, [None] * len(functions)
        )
        reply: Reply = pickle.loads(self.worker.run(pickle.dumps(batch)))
        return reply


def test_a_batch_is_run_in_order_and_timed() -> None:
    driver = Driver()
    reply = driver.run(lambda: 1, lambda: "two", lambda: [3])
    assert reply.outcomes == [1, "two", [3]] and not reply.refused
    assert [timing.calls for timing in reply.timings.values()] == [1, 1, 1]
    assert experimental_get_current_worker_index() == 0


def test_a_batch_ends_with_the_first_error() -> None:
    def fail() -> None:
        raise ValueError("bad")

    reply = Driver().run(lambda: 1, fail, lambda: 3)
    assert len(reply.outcomes) == 2
    assert isinstance(reply.outcomes[1], Raised)
    assert reply.outcomes[1].summary == "ValueError: bad"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_function_that_cannot_reach_a_server_is_not_at_fault(is_wrapped: bool) -> None:
    def read() -> None:
        lost = ParameterServerUnreachableError(2, "there:1", 3.0, "no answer")
        if is_wrapped:
            raise ValueError("what a library makes of it") from lost
        raise lost

    driver = Driver()
    reply = driver.run(lambda: 1, read, lambda: 3)
    assert reply.outcomes == [] and "parameter server 2 (there:1)" in reply.unreachable
    # It runs nothing until it reaches all servers.
    assert driver.run(lambda: 1).refused
    Setup.fails = True
    said = driver.worker.start(0, b"")
    assert isinstance(said, Raised) and said.summary == "ConnectionError: no answer"
    Setup.fails = False
    assert isinstance(driver.worker.start(0, b""), Greeting)
    assert driver.run(lambda: 1).outcomes == [1]


def test_a_batch_that_takes_long_is_cut_short() -> None:
    reply = Driver().run(*[lambda: time.sleep(LONGEST_SECONDS / 2) or 1] * 20)
    assert 1 <= len(reply.outcomes) < 20


def test_a_batch_for_another_process_is_refused() -> None:
    driver = Driver()
    driver.boot = "other"
    assert driver.run(lambda: 1).refused
    assert pickle.loads(Worker().run(pickle.dumps(ClosureBatch(1, "", (), (), [], [])))).refused


def test_recalled_closures_are_not_started() -> None:
    driver = Driver()
    begun, go_on = threading.Event(), threading.Event()
    references_to = {"begun": begun, "go_on": go_on}

    def wait() -> int:
        references_to["begun"].set()
        assert references_to["go_on"].wait(300)
        return 1

    replies: list[Reply] = []
    batch = ClosureBatch(1, driver.boot, (), (), [1, 2, 1], [None] * 3)
    driver.worker._objects._objects.update({1: wait, 2: lambda: 2})
    thread = threading.Thread(
        target=lambda: replies.append(pickle.loads(driver.worker.run(pickle.dumps(batch))))
    )
    thread.start()
    assert begun.wait(300)
    assert driver.worker.ping() == Pulse(1, 1, driver.boot)
    pulse = driver.worker.recall(2)
    assert (pulse.batch, pulse.started) == (1, 1)
    go_on.set()
    thread.join(300)
    assert replies[0].outcomes == [1]
    assert driver.run(lambda: 1, number=2).outcomes == []
    assert driver.run(lambda: 1, number=3).outcomes == [1]


def test_a_worker_that_cannot_start_says_why() -> None:
    answer = Worker().start(13, pickle.dumps(Setup()))
    assert isinstance(answer, Raised) and answer.summary == "OSError: no server"


def test_starting_again_changes_nothing() -> None:
    driver = Driver()
    again = driver.worker.start(0, b"not looked at")
    assert isinstance(again, Greeting) and again.boot == driver.boot


def test_a_batch_whose_updates_do_not_arrive_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(Setup, "fails", True)
    reply = driver.run(lambda: 1, lambda: 2)
    assert [outcome.summary for outcome in reply.outcomes] == ["ConnectionError: no answer"] * 2


def test_what_is_forgotten_is_gone() -> None:
    driver = Driver()
    driver.run(lambda: 1)
    batch = ClosureBatch(2, driver.boot, (), (100,), [100], [None])
    (outcome,) = pickle.loads(driver.worker.run(pickle.dumps(batch))).outcomes
    assert outcome.summary == "KeyError: 100"

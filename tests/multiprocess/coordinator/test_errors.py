"""Errors of scheduled functions: who is told, when, and what becomes of the others."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distribax as dx
from distribax.cluster.ray.engine import Engine
from distribax.coordinator import (
    ClosureCancelledError,
    ClusterCoordinator,
    RemoteError,
    RemoteValueStatus,
    WorkersLostError,
)
from tests.multiprocess.coordinator.stand_in import PlainSetup, PlainStrategy

pytestmark = pytest.mark.multiprocess


class OwnError(Exception):
    """An exception of the program's own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


class StubbornError(Exception):
    """An exception that cannot be put together again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail() -> None:
    raise OwnError("bad luck", 7)


def one() -> int:
    return 1


TELLERS: dict[str, Callable[[ClusterCoordinator], Any]] = {
    "schedule": lambda coordinator: coordinator.schedule(one),
    "join": ClusterCoordinator.join,
    "done": ClusterCoordinator.done,
}


@pytest.mark.parametrize("teller", TELLERS)
def test_an_error_is_raised_by_whoever_comes_first_and_then_forgotten(
    coordinator: ClusterCoordinator, teller: str
) -> None:
    failed = coordinator.schedule(fail)
    with pytest.raises(OwnError, match="bad luck"):
        failed.fetch()
    with pytest.raises(OwnError, match="bad luck") as caught:
        TELLERS[teller](coordinator)
    assert caught.value.code == 7
    # Nobody else is told, but the value stays failed.
    coordinator.join()
    assert coordinator.done()
    assert coordinator.schedule(one).fetch() == 1
    for _ in range(2):
        with pytest.raises(OwnError):
            coordinator.fetch([failed])
    assert failed.status is RemoteValueStatus.ABORTED
    coordinator.join()


def test_the_worker_and_its_traceback_are_told(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(fail)
    with pytest.raises(OwnError) as caught:
        coordinator.join()
    text = "".join(traceback.format_exception(caught.value))
    assert "Raised by" in text and "fail on worker" in text
    assert 'raise OwnError("bad luck", 7)' in text


def test_an_exception_that_cannot_travel_is_told_in_words(
    coordinator: ClusterCoordinator,
) -> None:
    def stubborn() -> None:
        raise StubbornError("no ", "way")

    def leave() -> None:
        sys.exit(3)

    for fn, message in ((stubborn, "StubbornError: no way"), (leave, "SystemExit: 3")):
        coordinator.schedule(fn)
        with pytest.raises(RemoteError, match=message):
            coordinator.join()


def test_a_result_that_cannot_travel_is_an_error(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(lambda: (number for number in range(3)))
    with pytest.raises(TypeError, match="generator") as caught:
        coordinator.join()
    assert "returned" in "".join(caught.value.__notes__)


def test_a_result_that_cannot_be_unpickled_here_is_an_error(
    coordinator: ClusterCoordinator,
) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return _spring, ()

    coordinator.schedule(Trap)
    with pytest.raises(ValueError, match="sprung") as caught:
        coordinator.join()
    assert "cannot be unpickled here" in "".join(caught.value.__notes__)


def _spring() -> None:
    raise ValueError("sprung")


def test_nothing_runs_when_the_error_is_raised_and_the_others_are_cancelled(
    all_up: ClusterCoordinator, tmp_path: Path
) -> None:
    def work(number: int) -> int:
        (tmp_path / f"begin-{number}").touch()
        if number == 3:
            raise OwnError("third", 3)
        # The first function still runs when the error is known.
        while number == 0 and not (tmp_path / "begin-3").exists():
            time.sleep(0.01)
        time.sleep(0.2 if number else 2.0)
        (tmp_path / f"end-{number}").touch()
        return number

    values = [all_up.schedule(work, args=(number,)) for number in range(30)]
    with pytest.raises(OwnError, match="third"):
        all_up.join()
    begun = {path.name for path in tmp_path.glob("begin-*")}
    ended = {path.name.replace("end", "begin") for path in tmp_path.glob("end-*")}
    assert begun - ended == {"begin-3"}
    time.sleep(0.5)
    assert {path.name for path in tmp_path.glob("begin-*")} == begun
    outcomes: list[str] = []
    reasons: list[tuple[str, type]] = []
    for number, value in enumerate(values):
        try:
            assert value.fetch() == number
            outcomes.append("value")
        except OwnError:
            outcomes.append("failed")
        except ClosureCancelledError as error:
            outcomes.append("cancelled")
            reasons.append((str(error), type(error.__cause__)))
    assert outcomes.index("failed") == 3 and outcomes[-1] == "cancelled"
    assert outcomes[0] == "cancelled" and "begin-0" in ended
    assert "while it was running" in reasons[0][0]
    assert outcomes.count("value") < len(ended)
    assert outcomes.count("failed") == 1
    assert all("OwnError" in text and cause is OwnError for text, cause in reasons)
    assert all_up.schedule(one).fetch() == 1


def test_what_depends_on_a_failed_value_fails(coordinator: ClusterCoordinator) -> None:
    failed = coordinator.schedule(fail)
    with pytest.raises(OwnError):
        coordinator.join()
    dependent = coordinator.schedule(str, args=(failed,))
    with pytest.raises(OwnError):
        dependent.fetch()
    with pytest.raises(OwnError):
        coordinator.join()
    coordinator.join()


def test_the_end_of_an_iterator_is_the_end_of_the_sequence(
    coordinator: ClusterCoordinator,
) -> None:
    coordinator.schedule(lambda: next(iter([])))
    with pytest.raises(dx.OutOfRangeError):
        coordinator.join()


def test_updates_that_do_not_arrive_are_an_error(own_engine: Callable[[int], Engine]) -> None:
    class Deaf(PlainSetup):
        def flush(self) -> None:
            raise ConnectionError("the server is gone")

    coordinator = ClusterCoordinator(PlainStrategy(own_engine(1), Deaf()), view="none")
    try:
        value = coordinator.schedule(one)
        with pytest.raises(ConnectionError, match="the server is gone"):
            coordinator.join()
        with pytest.raises(ConnectionError):
            value.fetch()
    finally:
        coordinator.close()


def test_workers_that_cannot_start_are_told_of_at_once(own_engine: Callable[[int], Engine]) -> None:
    setup = PlainSetup("raise ImportError(f'worker {index} has no libx')")
    coordinator = ClusterCoordinator(PlainStrategy(own_engine(1), setup), view="none")
    try:
        value = coordinator.schedule(one)
        with pytest.raises(WorkersLostError) as caught:
            coordinator.join()
        assert "worker 0: " in str(caught.value)
        assert "worker 0 has no libx" in str(caught.value)
        with pytest.raises(ClosureCancelledError, match="WorkersLostError"):
            value.fetch()
    finally:
        coordinator.close()


def test_workers_that_start_at_the_second_try(
    own_engine: Callable[[int], Engine], tmp_path: Path
) -> None:
    setup = PlainSetup(
        f"flag = Path({str(tmp_path)!r}, f'tried-{{index}}')\n"
        "if not flag.exists(): flag.touch(); raise OSError('not yet')"
    )
    coordinator = ClusterCoordinator(PlainStrategy(own_engine(1), setup), view="none")
    try:
        assert coordinator.schedule(one).fetch() == 1
    finally:
        coordinator.close()


def test_no_worker_for_too_long(own_engine: Callable[[int], Engine]) -> None:
    setup = PlainSetup("import time; time.sleep(30)")
    strategy = PlainStrategy(own_engine(2), setup)
    coordinator = ClusterCoordinator(strategy, all_workers_timeout=1.0, view="none")
    try:
        coordinator.schedule(one)
        with pytest.raises(WorkersLostError, match=r"no worker for 1\.\d s") as caught:
            coordinator.join()
        message = str(caught.value)
        assert "worker 0: starting" in message and "worker 1: starting" in message
        assert "all_workers_timeout=..." in message
    finally:
        coordinator.close()

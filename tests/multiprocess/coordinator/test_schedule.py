"""Scheduling functions on real workers: arguments, results, what is sent and when."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.cluster.ray.engine import Engine
from distribax.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    RemoteValueStatus,
    experimental_get_current_worker_index,
)
from tests.multiprocess.coordinator.conftest import wait_until
from tests.multiprocess.coordinator.stand_in import PlainStrategy

pytestmark = pytest.mark.multiprocess


def add(x: Any, y: Any = 0) -> Any:
    return x + y


class Point:
    """A class of the program's own, which workers cannot import."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def moved(self, by: Any) -> Point:
        return Point(self.x + by)


CLOSED: list[ClusterCoordinator] = []


class Closing:
    """Closes coordinators when it is unpickled."""

    def __getstate__(self) -> int:
        return 1

    def __setstate__(self, state: int) -> None:
        for each in CLOSED:
            each.close()


def test_a_function_runs_on_a_worker_and_its_result_is_fetched(
    coordinator: ClusterCoordinator,
) -> None:
    value = coordinator.schedule(os.getpid)
    assert isinstance(value, RemoteValue)
    assert value.fetch() != os.getpid()
    assert value.fetch() in {worker.pid for worker in coordinator.status().workers}
    assert value.status is RemoteValueStatus.READY


def test_arguments(coordinator: ClusterCoordinator) -> None:
    values = [
        coordinator.schedule(add, args=(1,)),
        coordinator.schedule(add, args=[1], kwargs={"y": 2}),
        coordinator.schedule(add, kwargs={"x": "a", "y": "b"}),
        coordinator.schedule(functools.partial(add, 5), args=(6,)),
        coordinator.schedule(lambda: 7),
    ]
    assert coordinator.fetch(values) == [1, 3, "ab", 11, 7]


def test_arrays_come_back_as_numpy_and_get_puts_them_on_the_device(
    coordinator: ClusterCoordinator,
) -> None:
    def make(x: Any) -> Any:
        assert isinstance(x, jax.Array)
        return {"array": x * 2, "scalar": jnp.float32(1.5), "text": "t", "none": None, "n": (1,)}

    value = coordinator.schedule(make, args=(jnp.arange(3),))
    fetched, got = value.fetch(), value.get()
    assert type(fetched["array"]) is np.ndarray and fetched["array"].tolist() == [0, 2, 4]
    assert type(fetched["scalar"]) is np.float32 and fetched["scalar"] == 1.5
    assert isinstance(got["array"], jax.Array) and isinstance(got["scalar"], jax.Array)
    assert (fetched["text"], fetched["none"], fetched["n"]) == ("t", None, (1,))
    assert (got["text"], got["none"], got["n"]) == ("t", None, (1,))


def test_results_of_any_kind(coordinator: ClusterCoordinator) -> None:
    def key() -> Any:
        return jax.random.key(3)

    assert coordinator.schedule(key).fetch() == jax.random.key(3)
    assert coordinator.schedule(lambda: {1: b"x", (2, 3): [None]}).fetch() == {
        1: b"x",
        (2, 3): [None],
    }
    assert coordinator.schedule(lambda: np.array(["a", None], object)).fetch().tolist() == [
        "a",
        None,
    ]
    assert coordinator.schedule(lambda: np.int16(4)).fetch() == np.int16(4)
    assert coordinator.schedule(lambda: {1, 2}).fetch() == {1, 2}


def test_classes_of_the_program_are_the_same_here_and_there(
    coordinator: ClusterCoordinator,
) -> None:
    def double(point: Any) -> Any:
        assert isinstance(point, Point)
        return [Point(point.x * 2)]

    (doubled,) = coordinator.schedule(double, args=(Point(jnp.arange(2)),)).fetch()
    assert type(doubled) is Point
    assert type(doubled.x) is np.ndarray and doubled.x.tolist() == [0, 2]


def test_methods_are_sent_with_their_object_once(coordinator: ClusterCoordinator) -> None:
    point = Point(1)
    assert coordinator.schedule(point.moved, args=(1,)).fetch().x == 2
    point.x = 100
    assert coordinator.schedule(point.moved, args=(1,)).fetch().x == 2
    assert coordinator.schedule(Point(100).moved, args=(1,)).fetch().x == 101


def test_a_function_keeps_its_state_on_the_worker(all_up: ClusterCoordinator) -> None:
    calls: list[int] = []

    def count() -> tuple[int, int]:
        calls.append(1)
        return os.getpid(), len(calls)

    results = all_up.fetch([all_up.schedule(count) for _ in range(50)])
    assert calls == []
    for pid in {pid for pid, _ in results}:
        counted = [number for other, number in results if other == pid]
        assert sorted(counted) == list(range(1, len(counted) + 1))


def test_an_argument_is_taken_as_it_is_when_it_is_scheduled(
    coordinator: ClusterCoordinator,
) -> None:
    items = [1]
    values = []
    for number in range(2, 5):
        values.append(coordinator.schedule(sum, args=(items,)))
        items.append(number)
    assert coordinator.fetch(values) == [1, 3, 6]


def test_remote_values_are_arguments(coordinator: ClusterCoordinator) -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.3)
        return x

    first = coordinator.schedule(slow, args=(jnp.arange(3),))
    second = coordinator.schedule(add, args=({"x": first}["x"],), kwargs={"y": 1})
    third = coordinator.schedule(add, args=(first,), kwargs={"y": second})
    assert coordinator.status().queued >= 1
    nested = coordinator.schedule(lambda pair: pair["a"] - pair["b"], args=({"a": third, "b": 1},))
    assert coordinator.fetch({"n": nested, "three": 3})["n"].tolist() == [0, 2, 4]
    assert coordinator.fetch((second, [third]))[1][0].tolist() == [1, 3, 5]


def test_what_a_function_does_to_a_remote_value_is_its_own(coordinator: ClusterCoordinator) -> None:
    def change(array: Any) -> Any:
        array += 1
        return array

    zeros = coordinator.schedule(lambda: np.zeros(2))
    changed = coordinator.fetch([coordinator.schedule(change, args=(zeros,)) for _ in range(5)])
    assert np.array_equal(changed, np.ones((5, 2)))
    assert not zeros.fetch().any()


def test_a_function_may_capture_a_remote_value(coordinator: ClusterCoordinator) -> None:
    captured = coordinator.schedule(lambda: time.sleep(0.2) or 20)
    assert coordinator.schedule(lambda: captured + 1).fetch() == 21  # type: ignore[operator]


def test_per_worker_values(all_up: ClusterCoordinator) -> None:
    first = all_up.schedule(lambda: 5)
    values = PerWorkerValues([["a", 0], ["b", first]])
    assert values.values[0] == ["a", 0]

    def look(own: Any) -> Any:
        time.sleep(0.01)
        return experimental_get_current_worker_index(), own

    found = all_up.fetch([all_up.schedule(look, args=(values,)) for _ in range(40)])
    assert {index for index, _ in found} == {0, 1}
    assert all(own == (["a", 0], ["b", 5])[index] for index, own in found)


def test_functions_that_take_long_do_not_hold_up_others(all_up: ClusterCoordinator) -> None:
    def wait(seconds: float) -> int:
        time.sleep(seconds)
        return experimental_get_current_worker_index()

    # The coordinator learns that it is a quick function, and is wrong about the first of many.
    for _ in range(4):
        all_up.schedule(wait, args=(0.0,))
    all_up.join()
    slow = all_up.schedule(wait, args=(3.0,))
    quick = all_up.fetch([all_up.schedule(wait, args=(0.001,)) for _ in range(300)])
    assert slow.status is RemoteValueStatus.NOT_READY
    assert slow.fetch() not in quick[-100:]


def test_many_small_functions(all_up: ClusterCoordinator) -> None:
    before = all_up.status()
    values = [all_up.schedule(add, args=(number,)) for number in range(5000)]
    all_up.join()
    assert all_up.done()
    assert all_up.fetch(values) == list(range(5000))
    after = all_up.status()
    assert after.scheduled - before.scheduled == after.finished - before.finished == 5000
    assert not after.is_active and after.rate >= 0
    assert "workers 2/2" in after.line()


def test_schedule_waits_when_the_queue_is_full(
    own_engine: Callable[[int], Engine], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def wait() -> None:
        while not gate.exists():
            time.sleep(0.01)

    small = ClusterCoordinator(PlainStrategy(own_engine(1)), queue_size=3, view="none")
    scheduled: list[RemoteValue] = []

    def schedule() -> None:
        scheduled.extend(small.schedule(wait) for _ in range(8))

    thread = threading.Thread(target=schedule)
    try:
        wait_until(lambda: small.status().num_workers_up == 1)
        thread.start()
        # One runs, three wait, and the fifth does not get in.
        wait_until(lambda: small.status().running == 1 and small.status().queued == 3)
        time.sleep(0.2)
        assert small.status().scheduled == 4
        assert not small.done()
        gate.touch()
        thread.join(300)
        assert not thread.is_alive()
        small.join()
        assert small.status().finished == 8
    finally:
        gate.touch()
        small.close()


def test_there_is_one_coordinator_for_a_strategy(coordinator: ClusterCoordinator) -> None:
    strategy = coordinator.strategy
    again = dx.experimental.coordinator.ClusterCoordinator(strategy)
    assert again is coordinator
    assert again is dx.coordinator.ClusterCoordinator(strategy=strategy)
    assert again.schedule(add, args=(1,)).fetch() == 1


def test_the_status_names_workers_and_servers(all_up: ClusterCoordinator) -> None:
    status = all_up.status()
    assert [worker.index for worker in status.workers] == [0, 1]
    assert all(worker.state == "ready" for worker in status.workers)
    assert len({worker.pid for worker in status.workers}) == 2
    assert status.servers == ({"index": 0, "state": "ready"},)


def test_rounds_are_looked_after_while_the_program_waits(all_up: ClusterCoordinator) -> None:
    strategy: Any = all_up.strategy
    for wait in (lambda value: all_up.join(), lambda value: value.fetch()):
        watched, finished = strategy.num_watched, strategy.num_finished
        wait(all_up.schedule(time.sleep, args=(1.0,)))
        assert strategy.num_watched > watched
        all_up.join()
        assert strategy.num_finished > finished


def test_what_is_not_used_any_more_is_forgotten_by_workers(all_up: ClusterCoordinator) -> None:
    def num_definitions() -> int:
        from distribax.coordinator import references

        return len(references._lookup.__self__._definitions)  # type: ignore[attr-defined]

    size = max(all_up.fetch([all_up.schedule(num_definitions) for _ in range(8)]))
    for number in range(20):
        held = all_up.schedule(lambda number=number: np.full(10, number))
        assert all_up.schedule(np.sum, args=(held,)).fetch() == number * 10
    del held
    all_up.schedule(time.sleep, args=(0.0,)).fetch()
    sizes: Callable[[], list[int]] = lambda: all_up.fetch(  # noqa: E731
        [all_up.schedule(num_definitions) for _ in range(8)]
    )
    wait_until(lambda: max(sizes()) <= size + 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn=3 is not callable"),
        ({"fn": add, "args": 3}, TypeError, "args=3 is not a tuple"),
        ({"fn": add, "kwargs": [1]}, TypeError, r"kwargs=\[1\] is not a dict"),
        ({"fn": add, "kwargs": {1: 2}}, TypeError, r"kwargs=\{1: 2\} has a key that is not"),
        ({"fn": add, "args": (threading.Lock(),)}, TypeError, "cannot be sent to a worker"),
        ({"fn": add, "args": (PerWorkerValues([1]),)}, ValueError, "has 1 values for 2 workers"),
    ],
)
def test_wrong_arguments(
    coordinator: ClusterCoordinator, arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        coordinator.schedule(**arguments)
    assert coordinator.done()


def test_a_function_that_cannot_be_pickled(coordinator: ClusterCoordinator) -> None:
    lock = threading.Lock()

    def use() -> None:
        with lock:
            pass

    with pytest.raises(TypeError, match=r"fn=.*use cannot be sent to a worker: .*lock"):
        coordinator.schedule(use)


def test_values_of_another_coordinator(
    coordinator: ClusterCoordinator, own_engine: Callable[[int], Engine]
) -> None:
    other = ClusterCoordinator(PlainStrategy(own_engine(1)), view="none")
    try:
        foreign = RemoteValue(other._queue)
        with pytest.raises(ValueError, match="comes from another coordinator"):
            coordinator.schedule(add, args=(foreign,))
    finally:
        other.close()


def test_what_functions_print_is_shown(
    all_up: ClusterCoordinator, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = tmp_path / "shown"

    def report(number: int) -> int:
        print("first line\nsecond line", number, end="")
        return experimental_get_current_worker_index()

    def wait() -> None:
        print("begins")
        deadline = time.monotonic() + 20
        while not shown.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        print("ends")

    value = all_up.schedule(report, args=(7,))
    index = value.fetch()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"worker {index}: first line", f"worker {index}: second line 7"]
    # A long function is heard while it runs.
    value = all_up.schedule(wait)
    text = ""
    while "begins\n" not in text:
        time.sleep(0.05)
        text += capsys.readouterr().out
    assert "ends" not in text
    shown.touch()
    value.fetch()
    assert capsys.readouterr().out.endswith(": ends\n")


def test_what_functions_print_can_be_hidden(
    own_engine: Callable[[int], Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ClusterCoordinator(PlainStrategy(own_engine(1)), view="none", show_prints=False)
    try:
        assert quiet.schedule(lambda: print("something")).fetch() is None
    finally:
        quiet.close()
    assert capsys.readouterr().out == ""


def test_the_coordinator_is_absent_on_workers(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda: coordinator.schedule(add, args=(1,)))
    with pytest.raises(RuntimeError, match=r"coordinator.schedule: .* is not on this worker"):
        value.fetch()
    with pytest.raises(RuntimeError, match="is not on this worker"):
        coordinator.join()


def test_the_worker_index_outside_workers() -> None:
    with pytest.raises(RuntimeError, match="this is not a worker"):
        experimental_get_current_worker_index()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"queue_size": 0}, "queue_size=0 is not a whole number"),
        ({"queue_size": True}, "queue_size=True"),
        ({"worker_timeout": 0}, "worker_timeout=0 is not a positive number"),
        ({"all_workers_timeout": "x"}, "all_workers_timeout='x'"),
        ({"view": "big"}, "view='big' is not known. Expected 'auto', 'live'"),
    ],
)
def test_wrong_settings(engine: Engine, settings: Any, message: str) -> None:
    strategy = PlainStrategy(engine)
    with pytest.raises(ValueError, match=message):
        ClusterCoordinator(strategy, **settings)
    assert strategy.cluster_coordinator is None


def test_a_strategy_without_workers() -> None:
    with pytest.raises(ValueError, match=r"Expected a dx\.ParameterServerStrategy"):
        ClusterCoordinator(dx.OneDeviceStrategy("CPU:0"))  # type: ignore[arg-type]


def test_a_closed_coordinator(own_engine: Callable[[int], Engine]) -> None:
    strategy = PlainStrategy(own_engine(1))
    closed = ClusterCoordinator(strategy, view="none")
    running = closed.schedule(time.sleep, args=(60,))
    closed.close()
    closed.close()
    with pytest.raises(dx.coordinator.ClosureCancelledError, match="it was closed"):
        running.fetch()
    for use in (closed.join, closed.done, lambda: closed.schedule(add, args=(1,))):
        with pytest.raises(RuntimeError, match="ClusterCoordinator: it was closed"):
            use()
    again = ClusterCoordinator(strategy, view="none")
    assert again is not closed
    assert again.schedule(add, args=(1,)).fetch() == 1
    assert [worker.restarts for worker in again.status().workers] == [0]
    # Results are unpickled in the coordinator's own thread, which cannot wait for itself.
    CLOSED.append(again)
    value = again.schedule(Closing)
    assert isinstance(value.fetch(), Closing)
    CLOSED.clear()

    def is_closed() -> bool:
        try:
            again.join()
        except RuntimeError as error:
            return "ClusterCoordinator: it was closed" in str(error)
        return False

    # It ends when the thread has done with the result.
    wait_until(is_closed)
    threads = [threading.Thread(target=again.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

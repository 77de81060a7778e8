"""Workers that die or fall silent: nothing is lost, and they come back."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distribax.cluster.ray import engine as engines
from distribax.coordinator import ClusterCoordinator, WorkersLostError
from tests.multiprocess.coordinator.conftest import wait_until
from tests.multiprocess.coordinator.stand_in import PlainStrategy

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def coordinator(engine: engines.Engine) -> Iterator[ClusterCoordinator]:
    """Two workers that count as lost after three seconds of silence."""
    own = engines.start_embedded(num_workers=2, num_servers=0)
    made = ClusterCoordinator(
        PlainStrategy(own), worker_timeout=3.0, all_workers_timeout=300.0, view="none"
    )
    yield made
    made.close()
    own.close()


def note(folder: Path, number: int, seconds: float = 0.0) -> int:
    """Writes down that it was begun and ended, as a worker may die in between."""
    with open(folder / f"{number}", "a") as file:
        file.write("b")
        file.flush()
        time.sleep(seconds)
        file.write("e")
    return number


def history(folder: Path) -> dict[int, str]:
    return {int(path.name): path.read_text() for path in folder.iterdir()}


def pids(coordinator: ClusterCoordinator) -> list[int]:
    return [worker.pid for worker in coordinator.status().workers if worker.pid is not None]


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def test_a_worker_that_dies_inside_a_function(all_up: ClusterCoordinator, tmp_path: Path) -> None:
    values = [all_up.schedule(note, args=(tmp_path, n, 0.05)) for n in range(60)]
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 6)
    victim = all_up.status().workers[0]
    assert victim.pid is not None
    send(victim.pid, signal.SIGKILL)
    all_up.join()
    assert all_up.fetch(values) == list(range(60))
    done = history(tmp_path)
    assert sorted(done) == list(range(60)) and all("e" in text for text in done.values())
    wait_until(lambda: all_up.status().workers[0].restarts > victim.restarts)
    worker = all_up.status().workers[0]
    assert worker.pid != victim.pid and worker.problem
    assert all_up.status().retried >= 1


def test_a_worker_that_dies_between_functions(all_up: ClusterCoordinator) -> None:
    victim = all_up.status().workers[1]
    assert victim.pid is not None
    send(victim.pid, signal.SIGKILL)
    values = [all_up.schedule(pow, args=(n, 2)) for n in range(50)]
    assert all_up.fetch(values) == [n * n for n in range(50)]
    wait_until(lambda: all_up.status().workers[1].restarts > victim.restarts)


def test_both_workers_die_at_once(all_up: ClusterCoordinator, tmp_path: Path) -> None:
    values = [all_up.schedule(note, args=(tmp_path, n, 0.05)) for n in range(40)]
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 4)
    for pid in pids(all_up):
        send(pid, signal.SIGKILL)
    assert all_up.fetch(values) == list(range(40))
    assert all("e" in text for text in history(tmp_path).values())
    wait_until(lambda: all_up.status().num_workers_up == 2)


# `make chaos` kills hundreds, at any moment; the tests above, one in each kind of moment.
@pytest.mark.thorough
def test_workers_die_again_and_again(all_up: ClusterCoordinator, tmp_path: Path) -> None:
    chance = random.Random(7)
    over = threading.Event()

    def kill() -> None:
        for _ in range(8):
            if over.wait(chance.uniform(0.2, 1.0)):
                return
            send(chance.choice(pids(all_up)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        values = [all_up.schedule(note, args=(tmp_path, n, 0.02)) for n in range(200)]
        assert all_up.fetch(values) == list(range(200))
    finally:
        over.set()
        killer.join()
    assert all("e" in text for text in history(tmp_path).values())
    status = all_up.status()
    assert not status.is_active and status.failed == 0 and status.cancelled == 0


def test_a_worker_that_stops_answering(all_up: ClusterCoordinator, tmp_path: Path) -> None:
    values = [all_up.schedule(note, args=(tmp_path, n, 0.02)) for n in range(60)]
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 6)
    victim = all_up.status().workers[0]
    assert victim.pid is not None
    send(victim.pid, signal.SIGSTOP)
    try:
        assert all_up.fetch(values) == list(range(60))
        assert "no sign of life" in str(all_up.status().workers[0].problem)
        wait_until(lambda: all_up.status().workers[0].restarts > victim.restarts)
        assert not Path(f"/proc/{victim.pid}").exists()
    finally:
        send(victim.pid, signal.SIGCONT)


def test_a_worker_that_dies_while_an_error_is_waited_for(
    all_up: ClusterCoordinator, tmp_path: Path
) -> None:
    def work(number: int) -> None:
        (tmp_path / str(number)).write_text(str(os.getpid()))
        if number == 1:
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            raise ValueError("one")
        time.sleep(600)

    stuck, _ = [all_up.schedule(work, args=(number,)) for number in range(2)]
    wait_until(lambda: all_up.status().failed)
    assert not (tmp_path / "2").exists()
    os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
    with pytest.raises(ValueError, match="one"):
        all_up.join()
    with pytest.raises(RuntimeError, match="cancelled"):
        stuck.fetch()
    assert all_up.done()


def test_a_function_that_kills_its_workers(
    all_up: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distribax.coordinator.failure_policy.MAX_LOSSES", 2)

    def deadly() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    value = all_up.schedule(deadly)
    with pytest.raises(WorkersLostError, match=r"deadly was running on 2 workers when they died"):
        value.fetch()
    with pytest.raises(WorkersLostError):
        all_up.join()
    assert all_up.schedule(pow, args=(2, 3)).fetch() == 8


def test_a_worker_that_ray_has_given_up_is_made_anew(all_up: ClusterCoordinator) -> None:
    import ray

    strategy: Any = all_up.strategy
    before = all_up.status().workers[0]
    actor = ray.get_actor("worker-0", namespace=strategy.engine.namespace)
    ray.kill(actor, no_restart=True)
    values = [all_up.schedule(pow, args=(n, 2)) for n in range(50)]
    assert all_up.fetch(values) == [n * n for n in range(50)]
    wait_until(lambda: all_up.status().workers[0].restarts > before.restarts)
    assert all_up.status().workers[0].pid != before.pid

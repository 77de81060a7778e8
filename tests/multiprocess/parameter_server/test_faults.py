"""Processes of the cluster die and stop while it works; nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.errors import ParametersLostError
from distribax.parameter_server import actor
from distribax.testing import FaultInjector, History


def _wait_until(holds: Any, what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def _run(coordinator: Any, size: int, injector: FaultInjector) -> History:
    history = History(coordinator, size)
    with injector:
        for number in range(size):
            history.schedule(number)
            if number % 20 == 0:
                # Long enough for the faults to hit functions as well as the time between them.
                coordinator.schedule(time.sleep, args=(0.05,))
        coordinator.join()
    assert not injector.errors
    return history


def test_killed_workers_lose_nothing(coordinator: Any) -> None:
    injector = FaultInjector(coordinator, 1, kinds=["kill", "kill two"], pause=(0.1, 0.6), most=3)
    history = _run(coordinator, 600, injector)
    assert injector.faults
    history.check()
    assert (history.counts >= 1).all()
    _wait_until(
        lambda: all(worker.state == "ready" for worker in coordinator.status().workers),
        "all workers are back",
    )


# As in coordinator/test_faults.py, where it is the same coordinator without servers.
@pytest.mark.thorough
def test_a_stopped_worker_is_replaced(coordinator: Any) -> None:
    injector = FaultInjector(coordinator, 2, kinds=["stop"], pause=(0.05, 0.1), most=1)
    history = _run(coordinator, 200, injector)
    _wait_until(lambda: injector.faults or injector.strike("stop"), "there is a worker to stop")
    history.check()
    stopped = injector.faults[0]

    def replaced() -> bool:
        worker = coordinator.status().workers[stopped.index]
        return worker.state == "ready" and worker.pid != stopped.pid

    _wait_until(replaced, "the stopped worker has been replaced")


def _server(strategy: Any, index: int) -> dict[str, Any]:
    return next(each for each in strategy.server_status() if each["index"] == index)


def test_a_killed_server_comes_back_from_its_snapshot(
    strategy: dx.ParameterServerStrategy, coordinator: Any
) -> None:
    with strategy.scope():
        v = dx.Variable(np.zeros(3, np.float32))
    index = v.placement.specs[0].server
    _wait_until(lambda: "pid" in _server(strategy, index), "the server has answered")
    coordinator.schedule(lambda: v.assign_add(np.ones(3, np.float32)))
    coordinator.join()
    strategy.snapshot()
    coordinator.schedule(lambda: v.assign_add(np.full(3, 10.0, np.float32)))
    coordinator.join()
    np.testing.assert_array_equal(v.numpy(), np.full(3, 11.0))
    counts = strategy.source.client.status(index)["counts"]
    _wait_until(lambda: strategy.servers[index].counts == counts, "the changes are counted")
    before = strategy.servers[index].restarts
    os.kill(_server(strategy, index)["pid"], signal.SIGKILL)
    # A snapshot waits for the server that is being restarted.
    assert len(strategy.snapshot()) == len(strategy.servers)
    # What came after the snapshot is lost; everything goes on, and the user is told.
    coordinator.schedule(lambda: v.assign_add(np.full(3, 100.0, np.float32)))
    coordinator.join()
    np.testing.assert_array_equal(v.numpy(), np.full(3, 101.0))
    _wait_until(lambda: strategy.servers[index].restarts == before + 1, "the restart is noticed")
    assert f"parameter server {index} died and was restarted" in strategy.servers[index].lost
    assert "Lost are 1 x assign_add (" in strategy.servers[index].lost


def test_a_stopped_server_is_named_and_replaced(
    strategy: dx.ParameterServerStrategy, coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        v = dx.Variable(5.0)
    index = v.placement.specs[0].server
    strategy.snapshot()
    _wait_until(lambda: "pid" in _server(strategy, index), "the server has answered")
    os.kill(_server(strategy, index)["pid"], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(actor, "_ANSWER_SECONDS", 0.5)
        expected = rf"^parameter server {index} .* did not answer within 0.5 s"
        with pytest.raises(dx.ParameterServerUnreachableError, match=expected):
            strategy.snapshot()
    assert float(coordinator.schedule(lambda: v.read_value()).fetch()) == 5.0


def test_without_snapshots_a_lost_server_is_an_error_and_can_be_restored(tmp_path: Any) -> None:
    strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1, snapshot_interval=None)
    try:
        coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
        with strategy.scope():
            v = dx.Variable(3.0, name="v")
        checkpoint = dx.Checkpoint(v=v)
        path = checkpoint.save(tmp_path / "ckpt")
        _wait_until(lambda: "pid" in _server(strategy, 0), "the server has answered")
        os.kill(_server(strategy, 0)["pid"], signal.SIGKILL)
        coordinator.schedule(lambda: v.assign_add(1.0))
        with pytest.raises(ParametersLostError, match=r"parameter server 0.*Checkpoint"):
            coordinator.join()
        checkpoint.restore(path)
        coordinator.schedule(lambda: v.assign_add(1.0))
        coordinator.join()
        assert float(v) == 4.0
    finally:
        strategy.close()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_hundreds_of_faults_lose_nothing(coordinator: Any, seed: int) -> None:
    kinds = ["kill", "kill", "kill", "kill two", "stop"]
    injector = FaultInjector(coordinator, seed, kinds=kinds, pause=(0.05, 1.5), most=60)
    history = History(coordinator, 4000)
    with injector:
        number = 0
        while len(injector.faults) < 60 and number < 4000:
            history.schedule(number)
            coordinator.schedule(time.sleep, args=(0.02,))
            number += 1
            if number % 50 == 0:
                coordinator.join()
        coordinator.join()
    assert not injector.errors
    assert len(injector.faults) >= 40
    history.check()
    print(f"seed {seed}: {len(injector.faults)} faults, {history.duplicates} duplicates, 0 lost")


def test_the_injector_checks_its_kinds(coordinator: Any) -> None:
    with pytest.raises(ValueError, match=r"kinds=\('maim',\)"):
        FaultInjector(coordinator, 0, kinds=["maim"])


def test_the_history_names_what_is_lost(coordinator: Any) -> None:
    history = History(coordinator, 3)
    for number in range(3):
        history.schedule(number)
    coordinator.join()
    history.check()
    assert history.duplicates == 0
    history.ledger.assign([1, 0, 3])
    assert history.duplicates == 2
    with pytest.raises(AssertionError, match=r"updates are lost: \[1\] \(1 in all\)"):
        history.check()

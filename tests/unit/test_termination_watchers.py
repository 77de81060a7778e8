"""Notices that a machine is about to be taken away: Compute Engine's, and signals like Slurm's."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import distribax as dx
from distribax.training.termination_watchers import (
    GCETerminationWatcher,
    SignalTerminationWatcher,
)
from tests.unit.cluster.fake_server import Answer, Call, serving


def test_compute_engine_announces_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def answer(call: Call) -> Answer:
        assert call.headers["metadata-flavor"] == "Google"
        return 200, said[call.path.rpartition("/")[2]]

    with serving(answer) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"{server.host}:{server.port}")
        watch = GCETerminationWatcher(interval_seconds=0)
        assert not watch()
        said["preempted"] = "TRUE"
        assert watch()
        patient = GCETerminationWatcher(interval_seconds=3600)
        assert patient() and not patient()
        said |= {"preempted": "FALSE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
        assert watch()
    assert not watch(), "nobody answers"
    with pytest.raises(ValueError, match="interval_seconds=-1 is negative"):
        GCETerminationWatcher(-1)


def test_a_signal_of_slurm_saves(tmp_path: Path) -> None:
    v = dx.Variable(0.0)
    watch = SignalTerminationWatcher(signal.SIGUSR1)
    try:
        left: list[str] = []
        config = dx.TerminationConfig(watch, exit_fn=lambda: left.append("left"))
        with dx.PreemptionCheckpointHandler(
            None, dx.Checkpoint(v=v), tmp_path, termination_config=config
        ) as handler:
            handler.run(v.assign_add, 1.0)
            os.kill(os.getpid(), signal.SIGUSR1)
            handler.run(v.assign_add, 1.0)
        assert left == ["left"]
        restored = dx.Variable(0.0)
        dx.CheckpointManager(
            dx.Checkpoint(v=restored), tmp_path, max_to_keep=1
        ).restore_or_initialize()
        assert float(restored) == 1.0
    finally:
        watch.close()


def test_a_signal_is_heard_in_the_main_thread_only() -> None:
    errors: list[Exception] = []

    def make() -> None:
        try:
            SignalTerminationWatcher()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "Make it in the main thread" in str(errors[0])

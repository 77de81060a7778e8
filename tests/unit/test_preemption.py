"""`dx.PreemptionCheckpointHandler` in one process: SIGTERM, exit code, and going on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import distribax as dx


def _handler(directory: Path, v: dx.Variable, **config: Any) -> dx.PreemptionCheckpointHandler:
    termination = dx.TerminationConfig(**config) if config else None
    return dx.PreemptionCheckpointHandler(None, dx.Checkpoint(v=v), directory, termination)


def test_the_signal_makes_the_next_step_save_and_leave(tmp_path: Path) -> None:
    v = dx.Variable(0.0)
    before = signal.getsignal(signal.SIGTERM)
    handler = _handler(tmp_path, v)

    def step(told: bool) -> float:
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        return float(v.assign_add(1.0))

    assert handler.run(step, told=False) == 1.0
    assert handler.run(step, True) == 2.0
    with pytest.raises(SystemExit) as left:
        handler.run(step, False)
    assert left.value.code == 42
    assert float(v) == 2.0
    assert signal.getsignal(signal.SIGTERM) == before
    v.assign(0.0)
    with _handler(tmp_path, v) as again:
        assert float(v) == 2.0
        assert again.total_run_calls == 2
        again.run(step, False)
        assert again.total_run_calls == 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_manager_saves_by_its_own_rules(tmp_path: Path) -> None:
    v, step = dx.Variable(0.0), dx.Variable(0)
    checkpoint = dx.Checkpoint(v=v, step=step)
    manager = dx.CheckpointManager(checkpoint, tmp_path, step_counter=step, checkpoint_interval=100)
    told: list[int] = []
    config = dx.TerminationConfig(lambda: int(step) == 3, exit_fn=lambda: told.append(int(step)))
    with dx.PreemptionCheckpointHandler(None, manager, termination_config=config) as handler:
        manager.save()
        while not told:
            handler.run(step.assign_add, 1)
    assert told == [3]
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1", "ckpt-2"]
    # An evaluation reads it without a handler.
    v.assign(9.0)
    dx.Checkpoint(v=v).restore(manager.checkpoints[-1], partial=True)
    assert float(v) == 0.0


def test_own_functions_save_and_leave(tmp_path: Path) -> None:
    assert dx.experimental.TerminationConfig is dx.TerminationConfig
    assert dx.experimental.PreemptionCheckpointHandler is dx.PreemptionCheckpointHandler
    done: list[Any] = []
    with _handler(
        tmp_path,
        dx.Variable(0.0),
        termination_watcher_fn=lambda: True,
        save_fn=lambda *args, **kwargs: done.append((args, kwargs)),
        exit_fn=lambda: done.append("left"),
    ) as handler:
        handler.save_checkpoint_if_preempted(5, note="x")
    assert done == [((5,), {"note": "x"}), "left"]


def test_arguments_are_checked(tmp_path: Path) -> None:
    checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    manager = dx.CheckpointManager(checkpoint, tmp_path)
    with pytest.raises(ValueError, match="Leave it out"):
        dx.PreemptionCheckpointHandler(None, manager, tmp_path)
    with pytest.raises(TypeError, match="is neither"):
        dx.PreemptionCheckpointHandler(None, {}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_dir=None"):
        dx.PreemptionCheckpointHandler(None, checkpoint)
    with pytest.raises(TypeError, match="exit_fn=42 is not callable"):
        dx.TerminationConfig(exit_fn=42)  # type: ignore[arg-type]


def test_another_thread_cannot_listen(tmp_path: Path) -> None:
    raised: list[str] = []

    def make() -> None:
        try:
            _handler(tmp_path, dx.Variable(1.0))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(300)
    assert len(raised) == 1 and "in the main thread" in raised[0]

"""`dx.CheckpointManager`: numbers, the newest N, and what killed writers leave."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
import time
from pathlib import Path

import pytest

import distribax as dx
from tests.environment import inherited
from tests.forked import start_forked


def _names(manager: dx.CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    v = dx.Variable(0.0)
    manager = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path / "run", max_to_keep=2)
    assert manager.checkpoints == [] and manager.latest_checkpoint is None
    assert manager.directory == str(tmp_path / "run")
    for step in (8, 9, 10):
        v.assign(step)
        assert manager.save(step) == str(tmp_path / "run" / f"ckpt-{step}")
    assert _names(manager) == ["ckpt-9", "ckpt-10"]
    assert sorted(os.listdir(tmp_path / "run")) == ["ckpt-10", "ckpt-9"]
    # A new manager, as after a restart.
    v.assign(0.0)
    again = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path / "run", max_to_keep=2)
    assert again.restore_or_initialize() == again.latest_checkpoint == manager.checkpoints[-1]
    assert float(v) == 10.0


def test_what_was_saved_is_written_without_waiting_for_it(tmp_path: Path) -> None:
    v = dx.Variable(3.0)
    checkpoint = dx.Checkpoint(v=v)
    manager = dx.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    path = manager.save()
    before = sorted(tmp_path.rglob("*"))
    manager.sync()
    checkpoint.sync()
    assert sorted(tmp_path.rglob("*")) == before
    assert dx.train.latest_checkpoint(tmp_path) == path


def test_one_for_some_hours_is_kept_for_good(tmp_path: Path) -> None:
    """With arguments in TensorFlow's order, and its options; a restart does not forget."""
    checkpoint, start = dx.Checkpoint(v=dx.Variable(0.0)), time.time()
    manager = dx.CheckpointManager(checkpoint, tmp_path, 1, 2.0)
    for hour in (1, 3, 4, 6, 7):
        if hour == 6:
            manager = dx.CheckpointManager(checkpoint, tmp_path, 1, 2.0)
        path = manager.save(hour, options=None)
        assert path is not None and _names(manager) == [f"ckpt-{hour}"]
        os.utime(path, (start + hour * 3600.0 + 60.0,) * 2)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-3", "ckpt-6", "ckpt-7"]
    # One that is replaced is new.
    os.utime(str(manager.save(3)), (start + 7.5 * 3600.0,) * 2)
    manager.save(8)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-6", "ckpt-8"]
    # A clock that is set back does not end it.
    os.utime(tmp_path / "ckpt-8", (start - 86400.0,) * 2)
    manager.save(9)
    os.utime(tmp_path / "ckpt-9", (start - 86400.0 + 3600.0,) * 2)
    manager.save(10)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-10", "ckpt-6", "ckpt-8"]
    with pytest.raises(ValueError, match="keep_checkpoint_every_n_hours=0 is not positive"):
        dx.CheckpointManager(checkpoint, tmp_path, keep_checkpoint_every_n_hours=0)
    written = checkpoint.write(tmp_path / "other", None)
    checkpoint.read(written, None).assert_consumed()
    checkpoint.restore(checkpoint.save(tmp_path / "more", None), None).assert_consumed()


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    """Who goes back to an earlier checkpoint saves smaller numbers later; copies keep the order."""
    manager = dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(0.0)), tmp_path / "a", max_to_keep=2)
    for step in (100, 200, 101):
        manager.save(step)
    assert _names(manager) == ["ckpt-200", "ckpt-101"]
    shutil.copytree(tmp_path / "a" / "ckpt-101", tmp_path / "b" / "ckpt-101")
    shutil.copytree(tmp_path / "a" / "ckpt-200", tmp_path / "b" / "ckpt-200")
    copied = dx.CheckpointManager(manager.checkpoint, tmp_path / "b")
    assert _names(copied) == ["ckpt-200", "ckpt-101"]


def test_numbers_come_from_the_counter_or_go_up(tmp_path: Path) -> None:
    v, step = dx.Variable(0.0), dx.Variable(0)
    free = dx.CheckpointManager(
        dx.Checkpoint(v=v), tmp_path, max_to_keep=None, checkpoint_name="free"
    )
    for _ in range(7):
        free.save()
    assert _names(free) == [f"free-{number}" for number in range(1, 8)]
    # A program that has not restored goes on where the directory ends.
    fresh = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path, checkpoint_name="free")
    assert fresh.save() == str(tmp_path / "free-8")
    counted = dx.CheckpointManager(
        dx.Checkpoint(v=v, step=step), tmp_path, step_counter=step, checkpoint_interval=10
    )
    assert counted.checkpoint_interval == 10
    assert counted.save() is not None
    step.assign(9)
    assert counted.save() is None
    assert counted.save(check_interval=False) is not None
    step.assign(19)
    assert counted.save() is not None
    assert _names(counted) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    # The interval goes on from what was restored, and so do the numbers.
    step.assign(0)
    later = dx.CheckpointManager(
        dx.Checkpoint(v=v, step=step), tmp_path, step_counter=step, checkpoint_interval=10
    )
    later.restore_or_initialize()
    assert int(later.checkpoint.save_counter) == 3
    step.assign_add(9)
    assert later.save() is None


def test_the_clock_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(0.0)), tmp_path, max_to_keep=1)
    now = time.time_ns()
    manager.save(1)
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)
    monkeypatch.setattr(time, "time", lambda: (now - 10**15) / 1e9)
    manager.save(2)
    assert _names(manager) == ["ckpt-2"]


def test_damaged_notes_do_not_block_the_directory(tmp_path: Path) -> None:
    manager = dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(0.0)), tmp_path)
    for step in (1, 2):
        manager.save(step)
    (tmp_path / "ckpt-2" / "notes" / "metadata").write_text("[")
    assert _names(manager) == ["ckpt-2", "ckpt-1"]
    manager.save(3)
    assert _names(manager) == ["ckpt-2", "ckpt-1", "ckpt-3"]


def test_the_same_number_is_replaced(tmp_path: Path) -> None:
    v = dx.Variable(1.0)
    manager = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path)
    manager.save(5)
    v.assign(2.0)
    manager.save(5)
    assert _names(manager) == os.listdir(tmp_path) == ["ckpt-5"]
    v.assign(3.0)
    manager.restore_or_initialize()
    assert float(v) == 2.0


def test_half_written_ones_are_ignored_and_removed(tmp_path: Path) -> None:
    manager = dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(1.0)), tmp_path)
    manager.save(1)
    (tmp_path / ".ckpt-2.part-0123abcd").mkdir()
    (tmp_path / ".ckpt-2.part-0123abcd.orbax-checkpoint-tmp-7").mkdir()
    (tmp_path / ".other-2.part-0123abcd").mkdir()
    (tmp_path / "ckpt-3").mkdir()
    (tmp_path / "ckpt-best").mkdir()
    assert _names(manager) == ["ckpt-1"]
    manager.save(2)
    assert sorted(os.listdir(tmp_path)) == [
        ".other-2.part-0123abcd",
        "ckpt-1",
        "ckpt-2",
        "ckpt-3",
        "ckpt-best",
    ]
    assert _names(manager) == ["ckpt-1", "ckpt-2"]


def test_a_killed_writer_leaves_the_last_good_one(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        import orbax.checkpoint as ocp, distribax as dx
        v = dx.Variable(1.0)
        manager = dx.CheckpointManager(dx.Checkpoint(v=v), {str(tmp_path)!r})
        manager.save(1)
        v.assign(2.0)
        save = ocp.Checkpointer.save
        def killed(self, *args, **kwargs):
            save(self, *args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        ocp.Checkpointer.save = killed
        manager.save(2)
    """
    process = start_forked(textwrap.dedent(program), inherited())
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert len(os.listdir(tmp_path)) == 2
    v = dx.Variable(0.0)
    manager = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert float(v) == 1.0
    manager.save(2)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2"]


def test_without_a_checkpoint_the_init_function_is_called(tmp_path: Path) -> None:
    v = dx.Variable(1.0)
    checkpoint = dx.Checkpoint(v=v)
    assert dx.CheckpointManager(checkpoint, tmp_path).restore_or_initialize() is None
    manager = dx.CheckpointManager(checkpoint, tmp_path, init_fn=lambda: v.assign(7.0))
    assert manager.restore_or_initialize() is None
    assert float(v) == 7.0


def test_arguments_are_checked(tmp_path: Path) -> None:
    checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    with pytest.raises(TypeError, match=r"is not a dx\.Checkpoint"):
        dx.CheckpointManager({"v": 1}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_to_keep=0"):
        dx.CheckpointManager(checkpoint, tmp_path, max_to_keep=0)
    for name in ("", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="checkpoint_name="):
            dx.CheckpointManager(checkpoint, tmp_path, checkpoint_name=name)
    with pytest.raises(ValueError, match="needs a step_counter"):
        dx.CheckpointManager(checkpoint, tmp_path, checkpoint_interval=5)
    manager = dx.CheckpointManager(checkpoint, tmp_path)
    for number in (-1, [3], "latest"):
        with pytest.raises(ValueError, match="checkpoint_number="):
            manager.save(number)

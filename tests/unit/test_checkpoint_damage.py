"""Checkpoints that a disk has damaged, and writers that were killed in the middle."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.environment import inherited
from tests.forked import start_forked

# When one value cannot be read, Orbax closes its loop while others are still being read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

VALUES = np.arange(600, dtype=np.float32)


def _flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def _find_data(path: Path) -> Path:
    """Returns the file that holds the values."""
    return max((each for each in path.rglob("*") if each.is_file()), key=lambda e: e.stat().st_size)


def _damage(path: str | None) -> None:
    assert path is not None
    data = _find_data(Path(path))
    _flip(data, data.stat().st_size * 4)


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    v, half = dx.Variable(VALUES), dx.Variable(jnp.full(64, 1.5, jnp.bfloat16))
    checkpoint = dx.Checkpoint(v=v, half=half)
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    rng = random.Random(0)
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.stat().st_size)
    data = _find_data(path)
    found = 0
    for file in [data] * 20 + [rng.choice(files) for _ in range(20)]:
        good = file.read_bytes()
        _flip(file, rng.randrange(len(good) * 8))
        v.assign(jnp.zeros(600))
        try:
            checkpoint.restore(path)
        except dx.DamagedCheckpointError:
            found += 1
            np.testing.assert_array_equal(v.numpy(), 0.0)
        else:
            # What is not needed may be damaged; what is read is right.
            np.testing.assert_array_equal(v.numpy(), VALUES)
            np.testing.assert_array_equal(half.numpy().astype(np.float32), 1.5)
            assert int(checkpoint.save_counter) == 1
        file.write_bytes(good)
    assert found >= 20
    assert checkpoint.restore(path).assert_consumed()


def test_notes_that_are_still_notes_but_changed_are_found(tmp_path: Path) -> None:
    checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    notes = path / "notes" / "metadata"
    changed = json.loads(notes.read_text()) | {"order": 1000}
    notes.write_text(json.dumps(changed))
    with pytest.raises(dx.DamagedCheckpointError, match="its notes cannot be read, or have"):
        checkpoint.restore(path)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    path = Path(dx.Checkpoint(v=dx.Variable(VALUES)).save(tmp_path / "ckpt"))
    _find_data(path).unlink()
    with pytest.raises(dx.DamagedCheckpointError, match="is damaged"):
        dx.train.load_variable(path, "v")
    with pytest.raises(ValueError, match="is damaged"):
        dx.train.list_variables(path)


def test_a_value_that_is_missing(tmp_path: Path) -> None:
    old, new = dx.Checkpoint(v=dx.Variable(1.0)), dx.Checkpoint(w=dx.Variable(1.0))
    first, second = old.save(tmp_path / "old"), new.save(tmp_path / "new")
    shutil.rmtree(Path(second, "variables"))
    shutil.copytree(Path(first, "variables"), Path(second, "variables"))
    with pytest.raises(dx.DamagedCheckpointError, match=r"values \['v', 'w'\]"):
        new.restore(second)


def test_checkpoints_without_checksums_can_be_read(tmp_path: Path) -> None:
    v = dx.Variable(VALUES)
    checkpoint = dx.Checkpoint(v=v)
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    notes = path / "notes" / "metadata"
    saved = json.loads(notes.read_text())
    old = {key: saved[key] for key in ("positions", "library", "order")} | {"version": 1}
    notes.write_text(json.dumps(old))
    v.assign(jnp.zeros(600))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(v.numpy(), VALUES)
    assert dx.train.latest_checkpoint(tmp_path) == str(path)


def test_a_damaged_newest_one_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    v = dx.Variable(VALUES)
    manager = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path)
    for step in (1, 2, 3):
        v.assign(VALUES + step)
        manager.save(step)
    _damage(manager.checkpoints[-1])
    (tmp_path / "ckpt-2" / "notes" / "metadata").write_text("[")
    v.assign(jnp.zeros(600))
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    np.testing.assert_array_equal(v.numpy(), VALUES + 1)
    assert "ckpt-3 is damaged" in caplog.text and "ckpt-1" in caplog.text
    # The next one is the newest.
    manager.save()
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-4")


def test_all_are_damaged(tmp_path: Path) -> None:
    manager = dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(VALUES)), tmp_path)
    for step in (1, 2):
        manager.save(step)
        _damage(manager.latest_checkpoint)
    # To begin again would throw a training away.
    with pytest.raises(dx.DamagedCheckpointError, match=r"ckpt-2.*is damaged"):
        manager.restore_or_initialize()


def test_another_shape_is_no_damage(tmp_path: Path) -> None:
    dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(VALUES)), tmp_path).save(1)
    other = dx.CheckpointManager(dx.Checkpoint(v=dx.Variable(1.0)), tmp_path)
    with pytest.raises(ValueError, match="was saved with shape"):
        other.restore_or_initialize()


KILLED = """
import os, shutil, signal
from pathlib import Path
import distribax as dx

def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

v = dx.Variable(1.0)
checkpoint = dx.Checkpoint(v=v)
manager = dx.CheckpointManager(checkpoint, {directory!r}, max_to_keep=2)
for step in (1, 2):
    v.assign(float(step))
    manager.save(step)
v.assign(7.0)
"""


def _run_killed(program: str, directory: Path) -> None:
    source = KILLED.format(directory=str(directory)) + textwrap.dedent(program)
    process = start_forked(source, inherited())
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err


def test_killed_while_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    _run_killed(
        """
        rename = os.rename
        def rename_once(source, target):
            rename(source, target)
            if Path(source).name == "ckpt-2":
                kill()
        os.rename = rename_once
        manager.save(2)
        """,
        tmp_path,
    )
    assert not (tmp_path / "ckpt-2").exists()
    v = dx.Variable(0.0)
    manager = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path, max_to_keep=2)
    newest = str(tmp_path / "ckpt-2")
    assert dx.train.latest_checkpoint(tmp_path) == manager.latest_checkpoint == newest
    assert manager.restore_or_initialize() == newest and float(v) == 7.0
    assert float(dx.train.load_variable(newest, "v")) == 7.0
    manager.save(3)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-2", "ckpt-3"]
    assert float(dx.train.load_variable(newest, "v")) == 7.0
    # The same with a path of the user's, of which only the old one is left.
    os.rename(tmp_path / "ckpt-3", tmp_path / ".ckpt-3.old-0123abcd")
    assert float(dx.train.load_variable(tmp_path / "ckpt-3", "v")) == 7.0


def test_killed_while_an_old_checkpoint_is_removed(tmp_path: Path) -> None:
    _run_killed(
        """
        def remove_one_file(path, **options):
            next(each for each in Path(path).rglob("*") if each.name == "metadata").unlink()
            kill()
        shutil.rmtree = remove_one_file
        manager.save(3)
        """,
        tmp_path,
    )
    v = dx.Variable(0.0)
    everything = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path, max_to_keep=None)
    assert [Path(path).name for path in everything.checkpoints] == ["ckpt-2", "ckpt-3"]
    everything.save(4)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-2", "ckpt-3", "ckpt-4"]

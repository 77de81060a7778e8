"""Snapshots that others have written, may read, or that cannot be restored."""

from __future__ import annotations

import logging
import os
import pickle
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribax.parameter_server import OptimizerSpec, ParameterClient, ParameterSpec
from distribax.parameter_server.snapshots import snapshot_file
from distribax.parameter_server.snapshots.snapshot_file import DamagedSnapshotError, SnapshotState
from tests.unit.parameter_server.conftest import TOKEN, Cluster

VALUE = ParameterSpec("v", "value", (3,), "float32", 0)
TRACE = ("s",)


class _Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def _prepare(client: ParameterClient) -> None:
    client.create(VALUE, np.zeros(3, np.float32))
    pickled = cloudpickle.dumps(optax.sgd(1.0, momentum=1.0))
    client.register_optimizer(0, OptimizerSpec("o", pickled, ("v",), TRACE))
    client.set_note("note", b"kept")


def _with_optimizer(state: SnapshotState, pickled: bytes) -> SnapshotState:
    """Returns a copy of a snapshot with another pickle in it."""
    ((_, at),) = state.header["optimizers"]
    arrays = list(state.arrays)
    arrays[at] = np.frombuffer(pickled, np.uint8)
    return SnapshotState(state.header, arrays)


@pytest.mark.parametrize("token", [b"", b"another token"])
def test_a_pickle_that_somebody_else_has_written_is_not_read(
    cluster: Cluster, tmp_path: Path, token: bytes
) -> None:
    folder, mark = tmp_path / "snapshots", tmp_path / "mark"
    server = cluster.start(snapshot_dir=folder)
    client = cluster.client()
    _prepare(client)
    good = server.snapshot()
    forged = _with_optimizer(snapshot_file.read(good, TOKEN), pickle.dumps(_Trap(mark)))
    newest = snapshot_file.write(folder, 2**63, forged, token)
    server = cluster.restart(snapshot_dir=folder)
    assert not mark.exists()
    assert server.status()["restored"] == str(good)
    assert f"{newest}: DamagedSnapshotError" in server.status()["damaged"][0]


def test_an_old_snapshot_does_not_pass_for_a_new_one(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    _prepare(cluster.client())
    old = server.snapshot()
    renamed = old.rename(old.with_stem("9" * 20))
    with pytest.raises(DamagedSnapshotError, match="not written by a server of this cluster"):
        snapshot_file.read(renamed, TOKEN)


def test_a_snapshot_that_cannot_be_restored_is_set_aside_for_good(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    good = server.snapshot()
    # Whole and authentic, but its optimizer needs a module that is not there any more.
    gone = b"cmodule_that_is_gone\nname\n."
    state = _with_optimizer(snapshot_file.read(good, TOKEN), gone)
    newest = snapshot_file.write(tmp_path, 2**63, state, TOKEN)
    with caplog.at_level(logging.WARNING, "distribax"):
        server = cluster.restart(snapshot_dir=tmp_path)
    assert "set aside" in caplog.text and "module_that_is_gone" in caplog.text
    assert server.status()["restored"] == str(good)
    assert client.get_note("note") == b"kept"
    assert np.all(client.pull([VALUE])[0] == 0)
    files = [good, newest.with_suffix(".damaged"), tmp_path / "tally"]
    assert sorted(tmp_path.iterdir()) == files
    # It does not come back, and the next start has nothing to say.
    assert cluster.restart(snapshot_dir=tmp_path).status()["damaged"] == []


def test_only_the_owner_can_read_snapshots(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "snapshots"
    before = os.umask(0)
    try:
        server = cluster.start(snapshot_dir=folder)
        _prepare(cluster.client())
        path = server.snapshot()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, folder, folder.parent)]
    assert modes == [0o600, 0o700, 0o700]
    folder.chmod(0o777)  # As Ray does with its own.
    cluster.client().set_note("other", b"")
    server.snapshot()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_read_nor_replace_snapshots(cluster: Cluster) -> None:
    # Not in a folder of pytest's, which is closed to others itself.
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o777)
        server = cluster.start(snapshot_dir=Path(open_to_all, "above", "snapshots"))
        _prepare(cluster.client())
        path = server.snapshot()
        for command in (
            ["ls", path.parent],
            ["cat", path],
            ["touch", path],
            ["mv", path.parent, f"{open_to_all}/taken"],
        ):
            done = subprocess.run(command, user=65534, capture_output=True, text=True, check=False)
            assert done.returncode != 0 and "Permission denied" in done.stderr
        assert path.exists()


def test_a_folder_of_another_user_is_not_used(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    _prepare(cluster.client())
    server.snapshot()
    cluster.client().set_note("other", b"")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(PermissionError, match="this server runs as 4242"):
        server.snapshot()
    assert snapshot_file.list_files(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_link_of_another_user_is_no_folder(tmp_path: Path) -> None:
    own, planted = tmp_path / "own", tmp_path / "planted"
    own.mkdir(mode=0o755)
    (own / "download.partial").touch()
    planted.symlink_to(own)
    os.lchown(planted, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        snapshot_file.write(planted, 1, SnapshotState({}), TOKEN)
    assert snapshot_file.list_files(planted) == []
    assert [each.name for each in own.iterdir()] == ["download.partial"]
    assert stat.S_IMODE(own.stat().st_mode) == 0o755


def test_links_and_pipes_are_not_followed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / f"{1:020d}.dxsnap").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / f"{2:020d}.dxsnap")
    # Not even to a snapshot that is whole, or could be written.
    elsewhere = tmp_path / "elsewhere"
    whole = snapshot_file.write(elsewhere, 3, SnapshotState({}), TOKEN)
    (tmp_path / whole.name).symlink_to(whole)
    with pytest.raises(OSError, match="symbolic links"):
        snapshot_file.read(tmp_path / whole.name, TOKEN)
    target = tmp_path / "target"
    (tmp_path / f"{4:020d}.partial").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        snapshot_file.write(tmp_path, 4, SnapshotState({}), TOKEN)
    assert not target.exists()
    server = cluster.start(snapshot_dir=tmp_path)
    assert len(server.status()["damaged"]) == 3


@settings(max_examples=30)
@given(st.data())
def test_files_of_any_content_are_our_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("snapshots")
    state = SnapshotState({"a": 1}, [np.arange(5), np.float32(1)])
    path = snapshot_file.write(folder, 1, state, TOKEN)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = bytearray(data.draw(st.binary(max_size=200)))
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path.write_bytes(content)
    try:
        read = snapshot_file.read(path, TOKEN)
    except DamagedSnapshotError:
        return
    assert read.header == state.header and np.array_equal(read.arrays[0], np.arange(5))

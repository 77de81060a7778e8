"""A server that is started again: what it still has, what clients notice, and what is lost."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optax
import pytest

from distribax.parameter_server import (
    Apply,
    AssignAdd,
    OptimizerSpec,
    ParameterClient,
    ParametersLostError,
    ParameterSpec,
)
from distribax.parameter_server.snapshots import snapshot_file, snapshot_schedule
from tests.unit.parameter_server.conftest import TIMEOUT, Cluster

VALUE = ParameterSpec("v", "value", (100, 300), "float32", 0)
COUNT = ParameterSpec("c", "count", (), "int32", 0)
TRACE = ParameterSpec("s", "trace", (100, 300), "float32", 0)
ONES = np.ones(VALUE.shape, np.float32)


def _prepare(client: ParameterClient) -> None:
    client.create(VALUE, 0 * ONES)
    client.create(COUNT, np.int32(0))
    pickled = cloudpickle.dumps(optax.sgd(1.0, momentum=1.0))
    client.register_optimizer(0, OptimizerSpec("o", pickled, ("v",), ("s",), "c"))


def _step(client: ParameterClient) -> None:
    client.push({0: [Apply("o", (ONES,))]})
    client.flush()


def _read_losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns how many pushes each reconnection has lost, and of how many, as users are told."""
    texts = [record.getMessage() for record in caplog.records]
    return [found[1] for text in texts if (found := re.search(r"process: (\d+ of \d+)", text))]


def _until(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_goes_on_from_the_snapshot(
    any_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = any_cluster.start(snapshot_dir=tmp_path)
    client, fresh = any_cluster.client(), any_cluster.client()
    _prepare(client)
    client.set_note("note", b"kept")
    for _ in range(2):
        _step(client)
    old = client.pull_versions([VALUE])[0][0]
    path = server.snapshot()
    assert path.parent == tmp_path and server.snapshot() == path
    for _ in range(3):
        _step(client)
    client.pull([VALUE])
    server = any_cluster.restart(snapshot_dir=tmp_path)
    assert server.status()["restored"] == str(path) and server.status()["updates"] == 2
    (version, value), (_, count), (_, trace) = client.pull_versions([VALUE, COUNT, TRACE])
    assert np.all(value == -3) and np.all(trace == 2) and count == 2
    assert version > old, "versions never repeat: callers cache by them"
    assert _read_losses(caplog) == ["3 of 5"] and f"restored from {path}" in caplog.text
    _step(client)
    assert np.all(fresh.pull([VALUE])[0] == -6)
    assert fresh.get_note("note") == b"kept"


def test_nothing_is_lost_if_nothing_came_after_the_snapshot(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    _step(client)
    cluster.servers[0].snapshot()
    cluster.restart(snapshot_dir=tmp_path)
    _step(client)
    assert _read_losses(caplog) == ["0 of 1"] and client.pull([COUNT]) == [2]


def test_what_was_lost_is_counted_once(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    _step(client)
    cluster.servers[0].snapshot()
    for _ in range(2):
        _step(client)
        _step(client)
        cluster.restart(snapshot_dir=tmp_path)
    client.push({0: [AssignAdd("c", ONES)]})
    with pytest.raises(RuntimeError, match="count"):
        client.flush()
    cluster.restart(snapshot_dir=tmp_path)
    assert client.pull([COUNT]) == [1]
    assert _read_losses(caplog) == ["2 of 3", "2 of 3", "0 of 1"]


def test_an_error_is_remembered_with_its_push(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    client.push({0: [AssignAdd("c", ONES)]})
    with pytest.raises(RuntimeError, match="count"):
        client.flush()
    cluster.servers[0].snapshot()
    cluster.restart(snapshot_dir=tmp_path)
    assert client.pull([COUNT]) == [0]


def test_without_a_snapshot_the_loss_is_named(
    any_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    any_cluster.start()
    client, other = any_cluster.client(), any_cluster.client()
    _prepare(client)
    _step(client)
    other.pull([VALUE])
    any_cluster.restart()
    with pytest.raises(ParametersLostError, match=r"server 0 .* no snapshot.*dx\.Checkpoint"):
        _step(client)
    assert _read_losses(caplog) == ["1 of 1"]
    # Then all is made again.
    _prepare(client)
    _step(client)
    assert np.all(client.pull([VALUE])[0] == -1) and np.all(other.pull([VALUE])[0] == -1)


def test_a_new_client_of_an_empty_server_is_told_too(cluster: Cluster) -> None:
    with pytest.raises(ParametersLostError, match="started with nothing"):
        cluster.client().pull([VALUE])


def test_snapshots_are_taken_by_themselves(cluster: Cluster, tmp_path: Path) -> None:
    settings = {"snapshot_dir": tmp_path, "snapshot_interval": 0.05}
    server = cluster.start(**settings)
    client = cluster.client()
    _prepare(client)
    _step(client)
    _until(lambda: server.status()["snapshot_updates"] == 1)
    assert server.status()["snapshot_time"] <= time.time()
    server = cluster.restart(**settings)
    assert np.all(client.pull([VALUE])[0] == -1)


def test_what_was_created_is_soon_in_a_snapshot(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.start(snapshot_dir=tmp_path, snapshot_interval=3600.0)
    client = cluster.client()
    _prepare(client)
    _until(lambda: server.status()["snapshot"] is not None)
    client.set_note("later", b"")
    before = server.status()["snapshot_time"]
    _until(lambda: server.status()["snapshot_time"] > before)
    cluster.restart(snapshot_dir=tmp_path)
    assert client.get_note("later") == b"" and client.pull([COUNT]) == [0]


def test_a_snapshot_is_of_one_moment(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    _step(client)
    original = snapshot_file.write

    def late(*args: Any) -> Path:
        _step(client)
        client.set_note("late", b"")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_file, "write", late)
        server.snapshot()
    server = cluster.restart(snapshot_dir=tmp_path)
    assert server.status()["updates"] == 1
    assert client.pull([COUNT]) == [1] and client.get_note("late") is None


def test_two_snapshots_are_kept(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    (tmp_path / "00.partial").write_bytes(b"left by a process that was killed")
    client = cluster.client()
    _prepare(client)
    paths = []
    for _ in range(4):
        _step(client)
        paths.append(server.snapshot())
    assert sorted(tmp_path.iterdir()) == [*paths[2:], tmp_path / "tally"]


@pytest.mark.parametrize("damage", ["cut", "header", "array", "magic", "length", "empty"])
def test_a_damaged_snapshot_is_passed_over(
    cluster: Cluster, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    good = server.snapshot()
    _step(client)
    newest = server.snapshot()
    data = bytearray(newest.read_bytes())
    if damage == "cut":
        del data[-1000:]
    elif damage == "empty":
        data.clear()
    else:
        data[{"magic": 0, "length": 14, "header": 60, "array": -1}[damage]] ^= 1
    newest.write_bytes(data)
    with caplog.at_level(logging.WARNING, "distribax"):
        server = cluster.restart(snapshot_dir=tmp_path)
    assert str(newest) in caplog.text
    assert server.status()["restored"] == str(good)
    assert client.pull([COUNT]) == [0]
    assert sorted(tmp_path.iterdir()) == [
        good,
        newest.with_suffix(".damaged"),
        tmp_path / "tally",
    ]


def test_if_all_snapshots_are_damaged_the_loss_is_explained(
    cluster: Cluster, tmp_path: Path
) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    server.snapshot().write_bytes(b"nonsense")
    server = cluster.restart(snapshot_dir=tmp_path)
    assert len(server.status()["damaged"]) == 1
    with pytest.raises(ParametersLostError, match="not a snapshot"):
        client.pull([VALUE])


def test_a_snapshot_that_fails_does_not_end_the_server(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "snapshots"
    folder.write_text("a file is in the way")
    server = cluster.start(snapshot_dir=folder, snapshot_interval=0.05)
    client = cluster.client()
    _prepare(client)
    with caplog.at_level(logging.WARNING, "distribax"):
        _until(lambda: server.status()["snapshot_error"] is not None)
    with pytest.raises(OSError, match="snapshots"):
        server.snapshot()
    folder.unlink()
    _step(client)
    _until(lambda: server.status()["snapshot"] is not None)
    assert server.status()["snapshot_error"] is None


def test_a_full_disk_leaves_the_last_good_snapshot(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    good = server.snapshot()
    _step(client)

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            server.snapshot()
    assert list(tmp_path.glob("*.*")) == [good]


def test_settings_are_checked(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="snapshot_interval=0"):
        cluster.start(snapshot_dir=tmp_path, snapshot_interval=0)
    with pytest.raises(ValueError, match="takes no snapshots"):
        cluster.start().snapshot()
    with pytest.raises(ValueError, match="token is empty"):
        cluster.start(token=b"")


def test_a_server_that_has_nothing_new_still_uses_its_folder(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_schedule, "_TOUCH_SECONDS", 0.01)
    cluster.start(snapshot_dir=tmp_path, snapshot_interval=3600.0)
    os.utime(tmp_path, (0, 0))
    _until(lambda: tmp_path.stat().st_mtime > 0)

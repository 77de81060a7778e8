"""What a server has lost is counted by kind, whatever has ended its process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.parameter_server import Assign, AssignAdd, ParameterClient, ParameterSpec
from tests.unit.parameter_server.conftest import Cluster

VALUE = ParameterSpec("v", "value", (), "float32", 0)


def _change(client: ParameterClient, adds: int, assigns: int = 0) -> None:
    for _ in range(adds):
        client.push({0: [AssignAdd("v", np.float32(1))]})
    for _ in range(assigns):
        client.push({0: [Assign("v", np.float32(1))]})
    client.flush()


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> ParameterClient:
    cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    client.create(VALUE, np.float32(0))
    return client


def test_what_came_after_the_snapshot_is_counted(
    cluster: Cluster, client: ParameterClient, tmp_path: Path
) -> None:
    _change(client, 3, 1)
    cluster.servers[0].snapshot()
    _change(client, 2, 1)
    status = cluster.restart(snapshot_dir=tmp_path).status()
    assert status["counts"] == {"assign_add": 3, "assign": 1}
    assert status["lost_counts"] == {"assign_add": 2, "assign": 1}
    # A restart that loses nothing, and one before there is another snapshot.
    assert cluster.restart(snapshot_dir=tmp_path).status()["lost_counts"] == status["lost_counts"]
    _change(client, 4)
    lost = cluster.restart(snapshot_dir=tmp_path).status()["lost_counts"]
    assert lost == {"assign_add": 6, "assign": 1}


def test_a_process_that_was_given_up_counts_no_more(
    cluster: Cluster, client: ParameterClient, tmp_path: Path
) -> None:
    cluster.servers[0].snapshot()
    _change(client, 1)
    # It was taken for dead, and another one has its place.
    successor = Cluster(cluster._stack, "shared").start(snapshot_dir=tmp_path)
    _change(client, 5)
    assert successor.status()["lost_counts"] == {"assign_add": 1}
    assert cluster.restart(snapshot_dir=tmp_path).status()["lost_counts"] == {"assign_add": 1}


def test_only_the_owner_can_read_it(client: ParameterClient, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "tally").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 48, b"x" * 100_000])
def test_a_damaged_file_is_left_out(
    cluster: Cluster, client: ParameterClient, tmp_path: Path, content: bytes
) -> None:
    cluster.servers[0].snapshot()
    _change(client, 1)
    (tmp_path / "tally").write_bytes(content)
    assert cluster.restart(snapshot_dir=tmp_path).status()["lost_counts"] == {}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_not_followed(
    cluster: Cluster, client: ParameterClient, tmp_path: Path, kind: str
) -> None:
    _change(client, 2)
    tally = tmp_path / "tally"
    tally.rename(tmp_path / "other")
    if kind == "link":
        tally.symlink_to(tmp_path / "other")
    else:
        os.mkfifo(tally)
    assert cluster.restart(snapshot_dir=tmp_path).status()["lost_counts"] == {}


def test_without_space_nothing_is_kept_until_there_is_some(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    client.create(VALUE, np.float32(0))
    _change(client, 2)
    assert client.status(0)["lost_counts"] is None and os.listdir(tmp_path) == []
    cluster.servers[0].snapshot()
    _change(client, 3)
    assert cluster.restart(snapshot_dir=tmp_path).status()["lost_counts"] == {"assign_add": 3}

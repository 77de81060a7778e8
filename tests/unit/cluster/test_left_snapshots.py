"""Snapshots of servers that never came back are removed, and no others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from distribax.cluster.ray.left_snapshots import remove_left_snapshots

DAY = 24 * 3600.0


def _make(parent: Path, name: str, days: float) -> Path:
    folder = parent / name / "snapshots-1" / "server-0"
    folder.mkdir(parents=True)
    (folder / "1.dxsnap").touch()
    then = time.time() - days * DAY
    for path in (folder / "1.dxsnap", folder, folder.parent, folder.parent.parent):
        os.utime(path, (then, then))
    return parent / name


def test_only_old_ones_are_removed(tmp_path: Path) -> None:
    old = _make(tmp_path, f"distribax-{'ab' * 12}", 8)
    kept = [
        _make(tmp_path, f"distribax-{'cd' * 12}", 6),
        # A node's folder, and somebody else's.
        _make(tmp_path, "distribax-rs998cvp", 8),
        _make(tmp_path, "ab" * 12, 8),
    ]
    used = _make(tmp_path, f"distribax-{'ef' * 12}", 8)
    os.utime(used / "snapshots-1" / "server-0")
    link = tmp_path / f"distribax-{'aa' * 12}"
    link.symlink_to(kept[-1])
    assert remove_left_snapshots(tmp_path) == [old]
    assert sorted(tmp_path.iterdir()) == sorted([*kept, used, link])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_those_of_other_users_are_left_alone(tmp_path: Path) -> None:
    folder = _make(tmp_path, f"distribax-{'ab' * 12}", 8)
    os.chown(folder, 65534, 65534)
    assert remove_left_snapshots(tmp_path) == [] and folder.exists()

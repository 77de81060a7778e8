"""A node of Ray and the process that looks after it: who may join, and what ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distribax.cluster.ray import cluster_token
from distribax.cluster.ray.node import NodeLostError, RayNode
from distribax.cluster.ray.node_main import NodeSettings
from tests.conftest import RunFresh
from tests.multiprocess.marked_programs import wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _node(stack: contextlib.ExitStack, settings: NodeSettings) -> RayNode:
    node = RayNode(settings)
    stack.callback(node.close)
    return node


def _keeper(node: RayNode) -> psutil.Process:
    """Returns the process that looks after the node; those of refused nodes have ended."""
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (keeper,) = [p for p in alive if str(node.folder) in " ".join(p.cmdline())]
    return keeper


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


FORGET_THE_SPEC = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_del(b"cluster_spec", False, b"distribax")
"""


def _forget_the_spec(address: str, token: str) -> None:
    """Makes the cluster look like one that others have started.

    In another process: Ray has one token for a process, and this one may be connected elsewhere.
    """
    command = [sys.executable, "-c", FORGET_THE_SPEC, address]
    environment = cluster_token.make_token_environment(token, os.environ)
    subprocess.run(command, env=environment, check=True, timeout=300)


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the folder for temporary files one that Ray cannot use."""
    folder = tmp_path / f"it's \u00f6dd{'x' * 100}"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))


@pytest.mark.usefixtures("odd_folder")
def test_who_may_join_and_what_ends_a_node(stack: contextlib.ExitStack) -> None:
    token = cluster_token.make_token()
    head = _node(stack, NodeSettings(token, task="ps 0"))
    address = head.wait_until_up()
    assert address is not None
    assert head.folder.parent == Path("/tmp")
    member = NodeSettings(
        token, "worker 0", head="ps 0", head_address=address, resources={"w": 1.0}, timeout=0.5
    )
    first = _node(stack, member)
    assert first.wait_until_up() == address
    assert first.wait_until_ended(0) is False

    with pytest.raises(
        RuntimeError, match=r"worker 0 is part of the cluster already, at 127.0.0.1"
    ):
        _node(stack, member).wait_until_up()
    _forget_the_spec(address, token)
    with pytest.raises(RuntimeError, match="ps 0 is a Ray cluster that is not distribax's"):
        _node(stack, dataclasses.replace(member, resources={})).wait_until_up()

    (raylet,) = [p for p in _keeper(first).children() if "raylet" in p.name()]
    raylet.kill()
    with pytest.raises(RuntimeError, match=r"worker 0 has lost its cluster: .*raylet has ended"):
        first.wait_until_ended()
    first.close()
    assert not first.folder.exists()

    descendants = _keeper(head).children(recursive=True)
    os.kill(_keeper(head).pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ps 0: Ray failed .* looks after it has ended"):
        head.wait_until_ended()
    head.close()
    head.close()
    wait_until(lambda: [p for p in descendants if not _has_ended(p)] == [])
    assert not head.folder.exists()


def test_a_node_that_is_closed_has_ended(stack: contextlib.ExitStack) -> None:
    missing = NodeSettings("token", head="chief 0", head_address="127.0.0.1:1")
    node = _node(stack, missing)
    assert node.wait_until_up(0) is None
    node.close()
    assert node.wait_until_ended() is True
    with pytest.raises(RuntimeError, match="it was closed"):
        node.wait_until_up()


def test_a_head_that_has_failed_leaves_the_snapshots_to_its_successor(
    stack: contextlib.ExitStack,
) -> None:
    settings = NodeSettings(cluster_token.make_token())
    head = _node(stack, settings)
    head.wait_until_up()
    head.snapshot_folder.mkdir(mode=0o700)
    saved = head.snapshot_folder / "saved"
    saved.write_text("the training")
    (gcs,) = [p for p in _keeper(head).children(recursive=True) if p.name() == "gcs_server"]
    gcs.kill()
    with pytest.raises(NodeLostError, match="the process gcs_server has ended"):
        head.wait_until_ended()
    head.close()
    successor = _node(stack, settings)
    assert successor.snapshot_folder == head.snapshot_folder
    assert saved.read_text() == "the training"
    successor.wait_until_up()
    assert saved.exists()
    # Only the end of the training removes them.
    successor.close(end_cluster=True)
    assert not successor.snapshot_folder.exists()


CLOSED_AT_ONCE = """
import os, pathlib, tempfile
from distribax.cluster.ray.node_main import NodeLimits, NodeProcesses, NodeSettings, ParentProgram

limits = NodeLimits(*[5.0] * 6)
for has_failed in (True, False):
    saved = tempfile.mkdtemp()
    os.environ["DISTRIBAX_SNAPSHOT_FOLDER"] = saved
    program = ParentProgram(os.getppid())
    node = NodeProcesses(NodeSettings("token"), limits, tempfile.mkdtemp(), program)
    node.has_failed = has_failed
    # As when the program closes the node before the node itself leaves.
    node.leave(is_over=True)
    print(os.path.exists(saved))
"""


def test_a_failed_head_that_is_closed_at_once_keeps_the_snapshots(run_forked: RunFresh) -> None:
    assert run_forked(CLOSED_AT_ONCE).split() == ["True", "False"]

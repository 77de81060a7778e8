"""A node of a Ray cluster on this machine, as its program sees it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.ray import node_main
from distribax.cluster.ray.cluster_token import (
    GCS_PATIENCE,
    GCS_PATIENCE_VARIABLE,
    TOKEN_VARIABLE,
    make_token_environment,
)
from distribax.cluster.ray.left_snapshots import (
    DIGEST_SIZE,
    FOLDER_PREFIX,
    remove_left_snapshots,
)
from distribax.cluster.ray.node_main import (
    SNAPSHOT_FOLDER_VARIABLE,
    NodeEvent,
    NodeLimits,
    NodeSettings,
    NodeState,
)
from distribax.errors import DistribaxError

_logger = logging.getLogger(__name__)

_LIMITS: Final = NodeLimits(  # What each one means is documented there.
    head_lost=read_seconds("DISTRIBAX_HEAD_LOST_SECONDS", 20.0),
    farewell=read_seconds("DISTRIBAX_HEAD_FAREWELL_SECONDS", 5.0),
    claim=read_seconds("DISTRIBAX_TASK_CLAIM_SECONDS", 20.0),
    call=read_seconds("DISTRIBAX_HEAD_CALL_SECONDS", 5.0),
    kill=read_seconds("DISTRIBAX_NODE_KILL_SECONDS", 5.0),
    save=read_seconds("DISTRIBAX_NODE_SAVE_SECONDS", 30.0),
)
_LEAVE_SECONDS: Final = read_seconds("DISTRIBAX_NODE_LEAVE_SECONDS", 20.0) + _LIMITS.save
"""How long a node may take to end when it is closed, before it is killed."""

NODE_FOLDER_VARIABLE: Final = "DISTRIBAX_NODE_FOLDER"
"""Tells the actors on a node where its folder is. The folder is removed when the node ends."""
_LONGEST_FOLDER: Final = 16
"""Ray's sockets are 87 bytes further down, and the path of one has at most 103 on some systems."""
_LOG_LINES: Final = 15


class ClusterJoinError(DistribaxError, RuntimeError):
    """This process could not become part of its cluster; the text says why."""


class NodeLostError(ClusterJoinError):
    """This process is not part of its cluster any more; it may join again."""


class NodeFailedError(ClusterJoinError):
    """Ray has failed on this machine; another attempt may succeed."""


class RayNode:
    """A node of a Ray cluster that this process has started; it ends with the process.

    Args:
        settings: What the node is.

    Attributes:
        folder: The node's files; nobody but the user can reach them. It is removed with the node.
        ray_folder: Where Ray keeps its own, in it.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        for left in remove_left_snapshots(Path(_choose_parent_folder())):
            _logger.info("%s was removed: no server has used these snapshots for long", left)
        self.folder = Path(tempfile.mkdtemp(prefix="distribax-", dir=_choose_parent_folder()))
        self.ray_folder = self.folder / node_main.RAY_FOLDER
        self._changed = threading.Condition()
        self._address: str | None = None
        self._end: NodeEvent | None = None
        try:
            self._process = subprocess.Popen(
                self._make_command(),
                env=make_token_environment(
                    settings.token, _make_environment(self.folder, self.snapshot_folder)
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._reader = threading.Thread(
            target=self._read_events, name="distribax-ray-node", daemon=True
        )
        self._reader.start()

    def _make_command(self) -> list[str]:
        # -P: this folder is not a place to look for modules.
        program = [sys.executable, "-P", node_main.__file__, str(self.folder), str(os.getpid())]
        return [*program, self.settings.to_json(), json.dumps(asdict(_LIMITS))]

    def _read_events(self) -> None:
        """Notes what the node reports, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = NodeEvent.from_json(line)
            if event.state is NodeState.FAILED:
                event = NodeEvent(event.state, event.text + self._read_log_tail())
            self._note(event)
        if self._process.stdin is None or self._process.stdin.closed:
            self._note(NodeEvent(NodeState.ENDED, "it was closed"))
        else:
            reason = "the process that looks after it has ended unexpectedly"
            self._note(NodeEvent(NodeState.FAILED, reason))

    def _note(self, event: NodeEvent) -> None:
        with self._changed:
            if event.state is NodeState.UP:
                self._address = event.text
                _logger.info("%s has joined the cluster of %s", self.settings.task, event.text)
            elif self._end is None:
                self._end = event
                _logger.info("%s: %s: %s", self.settings.task, event.state.value, event.text)
            self._changed.notify_all()

    def _read_log_tail(self) -> str:
        """Returns the end of Ray's messages; their file is removed soon."""
        with contextlib.suppress(OSError):
            lines = (self.folder / node_main.LOG_NAME).read_text(errors="replace").splitlines()
            return "".join(f"\n    {line}" for line in lines[-_LOG_LINES:])
        return ""

    def wait_until_up(self, timeout: float | None = None) -> str | None:
        """Waits until the node is part of the cluster; returns the head's address.

        Args:
            timeout: How many seconds to wait; by default until the node itself gives up.

        Returns:
            The address; None if the node is not part of the cluster yet.

        Raises:
            ClusterJoinError: The node cannot join the cluster, or has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._end, timeout)
        if self._address is None and self._end is not None:
            raise self._make_error(self._end)
        return self._address

    def wait_until_ended(self, timeout: float | None = None) -> bool:
        """Waits until the node has ended; returns whether it has.

        Args:
            timeout: How many seconds to wait; by default without a limit.

        Raises:
            ClusterJoinError: The node has not ended with its cluster but has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end, timeout)
        if self._end is None:
            return False
        if self._end.state is not NodeState.ENDED:
            raise self._make_error(self._end)
        return True

    @property
    def snapshot_folder(self) -> Path:
        """Where the task's snapshots are; the same for all nodes of a task, one after the other.

        Its name depends on the cluster's secret, so that no other user can know it beforehand.
        """
        settings = self.settings
        secret = "\n".join((settings.token, settings.spec, settings.task)).encode()
        digest = hashlib.blake2b(secret, digest_size=DIGEST_SIZE).hexdigest()
        return Path(_choose_parent_folder(), FOLDER_PREFIX + digest)

    def _make_error(self, end: NodeEvent) -> ClusterJoinError:
        if end.state is NodeState.LOST:
            return NodeLostError(f"{self.settings.task} has lost its cluster: {end.text}")
        if end.state is NodeState.REFUSED:
            return ClusterJoinError(end.text)
        if "InvalidAuthToken" in end.text:
            return ClusterJoinError(
                f"{self.settings.task}: the cluster has another token. Give every process of the "
                f"cluster the same one, in the environment variable {TOKEN_VARIABLE}."
            )
        return NodeFailedError(f"{self.settings.task}: Ray failed on this machine: {end.text}")

    def describe_processes(self) -> str:
        """Returns which of Ray's processes on this machine are missing, as a part of a sentence."""
        import psutil  # Ray depends on it.

        states: dict[str, str] = dict.fromkeys(
            ("gcs_server", "raylet") if self.settings.is_head else ("raylet",), "is gone"
        )
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.name() in states and process.status() != psutil.STATUS_ZOMBIE:
                        is_stopped = process.status() == psutil.STATUS_STOPPED
                        states[process.name()] = "is stopped" if is_stopped else "runs"
        missing = [f"the process {name} {state}" for name, state in states.items()]
        return ", ".join(missing)

    def close(self, *, end_cluster: bool = False) -> None:
        """Ends the node's processes and waits for their end; a second call does nothing.

        Args:
            end_cluster: Whether to end the whole cluster with this node.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            if end_cluster:
                process.stdin.write(b"end\n")
            process.stdin.close()
        try:
            process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        process.stdout.close()
        if process.returncode:
            _kill_strays(process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_strays(keeper: int) -> None:
    """Kills what is left of a node whose keeper was killed: Ray's agents take a minute to end.

    They are in the keeper's session.
    """
    import psutil  # Ray depends on it.

    def is_stray(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            is_dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return os.getsid(process.pid) == keeper and not is_dead
        return False

    deadline = time.monotonic() + _LIMITS.kill
    while strays := [process for process in psutil.process_iter() if is_stray(process)]:
        for process in strays:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _choose_parent_folder() -> str:
    folder = tempfile.gettempdir()
    # Ray parses the commands of its processes, which contain the folder, as a shell does.
    is_plain = re.fullmatch(r"[\w./+@:=,-]*", folder, re.ASCII)
    return folder if is_plain and len(folder) <= _LONGEST_FOLDER else "/tmp"


def _make_environment(folder: Path, snapshots: Path) -> dict[str, str]:
    return dict(os.environ) | {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A worker can use the accelerators of its machine although Ray does not count them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        GCS_PATIENCE_VARIABLE: GCS_PATIENCE,
        NODE_FOLDER_VARIABLE: str(folder),
        SNAPSHOT_FOLDER_VARIABLE: str(snapshots),
    }

"""This machine's node of a Ray cluster, seen from the program that owns it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from distribax.cluster.ray.cluster_token import TOKEN_VARIABLE, token_environment
from distribax.errors import DistribaxError

_NODE_MAIN: Final = Path(__file__).with_name("node_main.py")
NODE_FOLDER_VARIABLE: Final = "DISTRIBAX_NODE_FOLDER"
"""Tells the actors on a node where its folder is; it is removed when the node ends."""
_LONGEST_FOLDER: Final = 40
"""Ray's sockets are in the folder, and the path of a socket has at most 107 characters."""
_LEAVE_SECONDS: Final = 20.0
_KILL_SECONDS: Final = 5.0
_LOG_LINES: Final = 15
_KEEPER_ENDED: Final = "the process that looks after it has ended unexpectedly"


class ClusterJoinError(DistribaxError, RuntimeError):
    """This process could not become part of its cluster; the text says why."""


@dataclass(frozen=True)
class NodeSettings:
    """What a node is: its task, its resources, and the cluster that it is to be part of.

    Attributes:
        token: The cluster's secret.
        task: The task in words, such as "worker 0".
        host: The IP address that the node is to use; None for that which reaches the head.
        port: The port of the cluster's head, if this is it; 0 for a free one.
        head: The task that is the cluster's head, in words.
        head_address: Its address; None if this node is the head.
        spec: The cluster spec as text, the same for all nodes.
        resources: Ray's resources of the node, beside the processors.
        timeout: How many seconds to wait for the head.
    """

    token: str
    task: str = "the program"
    host: str | None = "127.0.0.1"
    port: int = 0
    head: str = "the program"
    head_address: str | None = None
    spec: str = "{}"
    resources: Mapping[str, float] = field(default_factory=dict)
    timeout: float = 60.0


class RayNode:
    """A node of a Ray cluster that this process has started; it ends with the process.

    Args:
        settings: What the node is.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="distribax-", dir=_parent_folder()))
        self._changed = threading.Condition()
        self._address: str | None = None
        self._end: dict[str, str] | None = None
        try:
            self._process = subprocess.Popen(
                # -P: the package's folder is not a place to look for modules.
                [sys.executable, "-P", str(_NODE_MAIN), self._arguments()],
                env=token_environment(settings.token, _environment(self.folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._reader = threading.Thread(target=self._read, name="distribax-ray-node", daemon=True)
        self._reader.start()

    def _arguments(self) -> str:
        s = self.settings
        return json.dumps(
            {
                "parent": os.getpid(),
                "folder": str(self.folder),
                "task": s.task,
                "host": s.host,
                "port": s.port,
                "head": s.head,
                "head_address": s.head_address,
                "spec": s.spec,
                "resources": dict(s.resources),
                "num_cpus": os.cpu_count() or 1,
                "timeout": s.timeout,
            }
        )

    def _read(self) -> None:
        """Notes what the node tells, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["state"] == "failed":
                event["reason"] += self._log_tail()
            self._note(event)
        closed = self._process.stdin is None or self._process.stdin.closed
        end = {"state": "ended"} if closed else {"state": "failed", "reason": _KEEPER_ENDED}
        self._note(end)

    def _note(self, event: dict[str, str]) -> None:
        with self._changed:
            if event["state"] == "up":
                self._address = event["address"]
            elif self._end is None:
                self._end = event
            self._changed.notify_all()

    def _log_tail(self) -> str:
        """Returns the end of what Ray has written here; the folder is removed soon."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "node.log").read_text(errors="replace").splitlines()
            return "".join(f"\n    {line}" for line in lines[-_LOG_LINES:])
        return ""

    def wait_until_up(self, timeout: float | None = None) -> str | None:
        """Waits until the node is part of the cluster; returns the head's address, None if late.

        The node itself gives up when the head does not come; then a ClusterJoinError is raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._end, timeout)
        if self._address is None and self._end is not None:
            raise ClusterJoinError(_reason(self.settings.task, self._end))
        return self._address

    def wait_until_ended(self, timeout: float | None = None) -> bool:
        """Waits until the node has ended; returns whether it has, within the timeout.

        A ClusterJoinError is raised if it has not ended with its cluster but has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end, timeout)
        if self._end is None:
            return False
        if self._end["state"] in ("failed", "refused"):
            raise ClusterJoinError(_reason(self.settings.task, self._end))
        return True

    def close(self, *, end_cluster: bool = False) -> None:
        """Ends the node's processes and waits for it; the second time it does nothing."""
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


def _reason(task: str, event: Mapping[str, str]) -> str:
    reason = event.get("reason", "it was closed")
    if event["state"] == "refused":
        return reason
    if "InvalidAuthToken" in reason:
        return (
            f"{task}: the cluster has another token. Give every process of the cluster the same "
            f"one, in the environment variable {TOKEN_VARIABLE}."
        )
    return f"{task}: Ray failed on this machine: {reason}"


def _kill_strays(keeper: int) -> None:
    """Kills what is left of a node whose keeper was killed: Ray's agents take a minute to end.

    They are in the session that the keeper has made for itself. Where there is no /proc, they are
    left to themselves.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while strays := [pid for pid in _process_ids() if _is_alive(pid, keeper)]:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _is_alive(pid: int, session: int) -> bool:
    """Tells whether a process is one of the session and has not ended."""
    try:
        state, _, _, its_session, *_ = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        )
    except OSError:
        return False
    return int(its_session) == session and state not in "ZX"


def _parent_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"


def _environment(folder: Path) -> dict[str, str]:
    return dict(os.environ) | {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A worker sees its machine's accelerators without Ray counting them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        NODE_FOLDER_VARIABLE: str(folder),
    }

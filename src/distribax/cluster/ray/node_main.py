"""One node of a Ray cluster: the process that starts Ray's processes here, and ends them.

Ray's own processes do not always end with the program that has started them, and their folder
never does. So they have a parent of their own, this one: it ends when its program says so or is
gone, whatever has ended it, takes everything that runs below it with it, and removes the folder.

It is started by its path and imports nothing of distribax, so that it starts quickly. It takes its
settings as JSON on the command line and the token in Ray's environment variables, and tells what
happens as lines of JSON on its standard output. The end of its standard input ends the node, and a
line "end" before it the whole cluster.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from typing import Any, Final

_NAMESPACE: Final = b"distribax"
_ENDED: Final = b"ended"
_SPEC: Final = b"cluster_spec"
_POLL_SECONDS: Final = 0.25
_GONE_SECONDS: Final = 5.0
"""How long the head may be out of reach before the cluster counts as ended."""
_FAREWELL_SECONDS: Final = 5.0
"""How long the head stays at the end, so that the other nodes hear of it."""
_CLAIM_SECONDS: Final = 20.0
"""How long it may take to notice that a task's earlier node is dead, when it is started again."""
_CALL_SECONDS: Final = 5
_KILL_SECONDS: Final = 5.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_OBJECT_STORE_BYTES: Final = 256 << 20
_SYSTEM_CONFIG: Final = {
    # Worker processes are for actors, which come with environment variables of their own.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # A machine that vanishes is noticed within some ten seconds; with Ray's own values, thirty.
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
    # A process that dies is noticed within some 0.2 seconds; with Ray's own values, 1 to 2.
    "timeout_ms_task_wait_for_death_info": 100,
    "core_worker_internal_heartbeat_ms": 100,
    # Ray runs actors with a niceness of 15. Such light tasks Linux does not spread over cores with
    # care: one may be idle while two of them share another.
    "worker_niceness": 0,
    # There is no dashboard, so nobody would see what is collected for it.
    "enable_metrics_collection": False,
    "enable_timeline": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
}


class Refused(Exception):
    """The node cannot be part of the cluster; the text is for the user."""


class Program:
    """The program that has started this node: what it says, and whether it is still there."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._events = os.dup(1)

    def tell(self, **event: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(self._events, json.dumps(event).encode() + b"\n")

    def wait(self) -> bool:
        """Waits for the program to say something or to end; returns whether it said "end"."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):
            # The pipe's end is not enough: processes that the program has forked keep it open.
            poll.register(os.pidfd_open(self._pid), select.POLLIN)
        while os.getppid() == self._pid:
            if any(fd == 0 for fd, _ in poll.poll(1000)):
                return os.read(0, 64).strip() == b"end"
        return False


class Node:
    """Ray's processes on this machine, as the settings want them."""

    def __init__(self, settings: dict[str, Any], program: Program) -> None:
        self.settings = settings
        self.program = program
        self.is_head: bool = settings["head_address"] is None
        self.ray_node: Any = None
        self.client: Any = None
        self._leaving = threading.Lock()

    def start(self) -> None:
        """Starts Ray here: a new cluster's head, or a member of the cluster at the address."""
        from ray import _raylet
        from ray._private import node, parameter

        class QuietNode(node.Node):
            def start_api_server(self, **_: Any) -> None:
                """Leaves out the dashboard's server, which takes a second to start."""

        settings = self.settings
        head_address = None
        if not self.is_head:
            head_address = self._await_head()
            self.client = _raylet.GcsClient(address=head_address)
            self._check_membership()
        parameters = parameter.RayParams(
            node_ip_address=settings["host"] or _own_address(head_address),
            gcs_address=head_address,
            gcs_server_port=settings["port"] if self.is_head else None,
            num_cpus=settings["num_cpus"],
            resources=settings["resources"],
            object_store_memory=_OBJECT_STORE_BYTES,
            temp_dir=settings["folder"],
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            _system_config=_SYSTEM_CONFIG if self.is_head else None,
        )
        self.ray_node = QuietNode(
            parameters, head=self.is_head, shutdown_at_exit=False, spawn_reaper=True
        )
        if self.is_head:
            self.client = _raylet.GcsClient(address=self.ray_node.gcs_address)
            self.client.internal_kv_put(_SPEC, settings["spec"].encode(), True, _NAMESPACE)
        self.program.tell(state="up", address=self.ray_node.gcs_address)

    def _await_head(self) -> str:
        """Waits until somebody listens where the head is to be; returns its IP address and port."""
        address, seconds = self.settings["head_address"], self.settings["timeout"]
        deadline = time.monotonic() + seconds
        while (found := _listener(address)) is None:
            if time.monotonic() > deadline:
                raise Refused(
                    f"{self.settings['task']} waited {seconds:g} s for {self.settings['head']} at "
                    f"{address}, which does not answer. Start it, or check that its address can be "
                    "reached from here."
                )
            time.sleep(_POLL_SECONDS)
        return found

    def _check_membership(self) -> None:
        """Raises Refused if the cluster is another one, or has this task already."""
        spec, task = self.settings["spec"], self.settings["task"]
        deadline = time.monotonic() + min(_CLAIM_SECONDS, self.settings["timeout"])
        while (first := self.client.internal_kv_get(_SPEC, _NAMESPACE, _CALL_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise Refused(f"{self.settings['head']} is a Ray cluster that is not distribax's.")
            time.sleep(_POLL_SECONDS)
        if first.decode() != spec:
            raise Refused(
                f"{task} and {self.settings['head']} have different cluster specs: {spec} and "
                f"{first.decode()}. Give every task the same one."
            )
        while owners := self._members(self.settings["resources"]):
            if time.monotonic() > deadline:
                raise Refused(
                    f"{task} is part of the cluster already, at {owners[0]}. Each task is one "
                    "process: end that one first, or give this one its own task_index."
                )
            time.sleep(_POLL_SECONDS)

    def _members(self, resources: dict[str, float] | None = None) -> list[str]:
        """Returns the addresses of the live nodes; given resources, of those that have one."""
        return [
            node.node_manager_address
            for node in self.client.get_all_node_info(timeout=_CALL_SECONDS).values()
            if node.state == node.ALIVE
            and (resources is None or resources.keys() & dict(node.resources_total).keys())
        ]

    def watch(self) -> str:
        """Returns when the cluster has ended, and why; raises if a process of Ray's has, alone."""
        last_seen = time.monotonic()
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                if self.client.internal_kv_get(_ENDED, _NAMESPACE, _CALL_SECONDS):
                    return "the coordinator has ended the cluster"
                last_seen = time.monotonic()
            except Exception as error:
                if time.monotonic() - last_seen > _GONE_SECONDS:
                    return f"{self.settings['head']} is gone ({error})"
                continue
            if dead := self.ray_node.dead_processes():
                raise RuntimeError(f"the process {dead[0][0]} has ended unexpectedly")

    def leave(self, *, end_cluster: bool = False) -> None:
        """Ends Ray's processes here and removes their folder; the second caller just waits."""
        with self._leaving:
            if (end_cluster or self.is_head) and self.client is not None:
                with contextlib.suppress(Exception):
                    self.client.internal_kv_put(_ENDED, b"1", True, _NAMESPACE, _CALL_SECONDS)
            if self.is_head and self.client is not None:
                self._bid_farewell()
            elif self.ray_node is not None:
                # The raylet tells the head that it goes: the task can be started again at once.
                with contextlib.suppress(Exception):
                    self.ray_node.kill_all_processes(check_alive=False, allow_graceful=True)
            _kill_descendants()
            shutil.rmtree(self.settings["folder"], ignore_errors=True)

    def _bid_farewell(self) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS
        with contextlib.suppress(Exception):
            while len(self._members()) > 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 5)


def _listener(address: str) -> str | None:
    """Returns the address with the host as an IP address if somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as connection:
            found = connection.getpeername()[0]
    except OSError:
        return None
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _own_address(head_address: str | None) -> str:
    """Returns the address with which this machine reaches the head."""
    assert head_address is not None
    host, _, port = head_address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0) as connection:
        return str(connection.getsockname()[0])


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends: none is lost sight of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    import psutil  # Ray brings it along.

    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)


def main() -> None:
    """Runs the node until its program or its cluster ends."""
    settings = json.loads(sys.argv[1])
    # Ctrl-C and a terminal's end are for the program; this process hears of the program's end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    program = Program(settings["parent"])
    with open(os.path.join(settings["folder"], "node.log"), "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _adopt_orphans()
    node = Node(settings, program)

    def leave_with_program() -> None:
        node.leave(end_cluster=program.wait())
        os._exit(0)

    threading.Thread(target=leave_with_program, name="program-watch", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        node.start()
        program.tell(state="ended", reason=node.watch())
    except Refused as refusal:
        program.tell(state="refused", reason=str(refusal))
    except Exception as error:
        program.tell(state="failed", reason=f"{type(error).__name__}: {error}")
    finally:
        node.leave()


if __name__ == "__main__":
    main()

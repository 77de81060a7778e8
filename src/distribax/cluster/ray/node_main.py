"""One node of a Ray cluster: the process that starts Ray's processes on this machine and ends them.

Ray's processes do not always end with the program that has started them, and their folder is never
removed. So they get a parent of their own, this process. It ends when its program tells it to or is
gone for whatever reason, kills all its descendants, and removes the folder.

It is started by its path and imports nothing of distribax, so that it starts quickly. Its command
line holds the folder, the id of the program's process, and the settings and time limits as JSON.
The token is in Ray's environment variables. The node reports its state as lines of JSON on its
standard output. The end of its standard input ends the node; a line "end" before that ends the
whole cluster.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

RAY_FOLDER: Final = "ray"
"""Ray's own folder in the node's. Ray opens it to all users, who cannot reach it there."""
LOG_NAME: Final = "node.log"
"""The file in the node's folder that Ray's messages go to."""
LEAVING_NAME: Final = "leaving"
"""The file that tells parameter servers to save, as the node leaves a cluster that goes on."""
SERVING_PREFIX: Final = "serving-"
"""Files with this name and a process id tell which processes save then, and end."""
SNAPSHOT_FOLDER_VARIABLE: Final = "DISTRIBAX_SNAPSHOT_FOLDER"
"""Tells parameter servers where their snapshots are kept: also by the task's next node."""
_NAMESPACE: Final = b"distribax"
_ENDED: Final = b"ended"
_SPEC: Final = b"cluster_spec"
_COORDINATOR: Final = b"coordinator"
_POLL_SECONDS: Final = 0.25
_PR_SET_CHILD_SUBREAPER: Final = 36
_OBJECT_STORE_BYTES: Final = 256 << 20
_SYSTEM_CONFIG: Final = {
    # Worker processes are for actors, which come with environment variables of their own.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # A machine that disappears is noticed within ten seconds; by default, it takes Ray thirty.
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
    # Years: otherwise Ray ends a process that has missed the head for a minute.
    "gcs_rpc_server_reconnect_timeout_s": 1 << 30,
    # A process that dies is noticed within 0.2 seconds; by default, it takes Ray 1 to 2.
    "timeout_ms_task_wait_for_death_info": 100,
    "core_worker_internal_heartbeat_ms": 100,
    # By default, Ray runs actors with a niceness of 15. Linux does not balance such tasks well: one
    # core may be idle while two tasks share another.
    "worker_niceness": 0,
    # There is no dashboard, so nobody would read what is collected for it.
    "enable_metrics_collection": False,
    "enable_timeline": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
}


@dataclass(frozen=True)
class NodeLimits:
    """How many seconds a node waits in each case.

    Attributes:
        head_lost: How long the head may be out of reach before the node counts as lost. Ray
            itself gives up a node that the head has not heard of for about ten seconds.
        farewell: How long the head stays when the cluster ends, so that the other nodes notice.
        claim: How long it may take to notice that a task's earlier node is dead, when the task is
            started again.
        call: How long the head may take to answer a request.
        kill: How long it may take until all processes of the node are dead.
        save: How long parameter servers may take to save when the node leaves the cluster.
    """

    head_lost: float
    farewell: float
    claim: float
    call: float
    kill: float
    save: float


@dataclass(frozen=True)
class NodeSettings:
    """What a node is: its task, its resources, and the cluster that it is to join.

    Attributes:
        token: The cluster's secret.
        task: The name of the task, such as "worker 0".
        host: The IP address of the node; None for the one from which it reaches the head.
        port: The port of the cluster's head, if this node is the head; 0 for a free one.
        head: The name of the task that is the cluster's head.
        head_address: The address of the head; None if this node is the head.
        spec: The cluster spec as text, the same for all nodes.
        resources: Ray's resources of the node, in addition to its processors.
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

    @property
    def is_head(self) -> bool:
        """Whether this node is the head of the cluster."""
        return self.head_address is None

    @property
    def is_visitor(self) -> bool:
        """Whether it is the node of a coordinator that is not in the cluster spec."""
        return self.host is None

    def to_json(self) -> str:
        """Returns the settings without the token: everybody can read a command line."""
        return json.dumps(asdict(self) | {"token": ""})


class NodeState(enum.Enum):
    """What a node reports to its program."""

    UP = "up"  # It is part of the cluster.
    ENDED = "ended"  # The cluster has ended, or the program has closed the node.
    REFUSED = "refused"  # It cannot be part of the cluster; the reason is meant for the user.
    LOST = "lost"  # It has lost the head, or as the head itself; another node may take its place.
    FAILED = "failed"  # Ray has failed on this machine.


@dataclass(frozen=True)
class NodeEvent:
    """A new state of a node.

    Attributes:
        state: The state.
        text: The head's address if the node is up, otherwise the reason.
    """

    state: NodeState
    text: str

    def to_json(self) -> str:
        """Returns the event as one line."""
        return json.dumps([self.state.value, self.text])

    @classmethod
    def from_json(cls, line: str | bytes) -> NodeEvent:
        """Returns the event that `to_json` has written."""
        state, text = json.loads(line)
        return cls(NodeState(state), text)


class Refusal(Exception):
    """The node cannot be part of the cluster; the text is meant for the user."""


class Lost(Exception):
    """The node is not part of its cluster any more; the text says why."""


class ParentProgram:
    """The program that has started this node."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._events = os.dup(1)

    def report(self, state: NodeState, text: str) -> None:
        """Tells the program the new state of the node."""
        with contextlib.suppress(OSError):
            os.write(self._events, NodeEvent(state, text).to_json().encode() + b"\n")

    def wait(self) -> bool:
        """Waits until the program closes the node or ends; returns whether it has sent "end"."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):
            # The pipe is not enough: processes that the program has forked keep it open.
            poll.register(os.pidfd_open(self._pid), select.POLLIN)
        while os.getppid() == self._pid:
            if any(fd == 0 for fd, _ in poll.poll(1000)):
                return os.read(0, 64).strip() == b"end"
        return False


class NodeProcesses:
    """Ray's processes on this machine, started according to the settings."""

    def __init__(
        self, settings: NodeSettings, limits: NodeLimits, folder: str, program: ParentProgram
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.folder = folder
        self.program = program
        self.ray_node: Any = None
        self.client: Any = None
        self.has_ended = False
        self.has_failed = False
        self._leaving = threading.Lock()
        self._has_left = False

    def start(self) -> None:
        """Starts Ray here: the head of a new cluster, or a member of an existing one."""
        from ray import _raylet
        from ray._private import node, parameter

        class QuietNode(node.Node):
            def start_api_server(self, **_: Any) -> None:
                """Does not start the dashboard's server, which takes a second."""

        settings = self.settings
        head_address = None
        if settings.head_address is not None:
            head_address = self._await_head(settings.head_address)
            self.client = _raylet.GcsClient(address=head_address)
            self._check_membership()
        parameters = parameter.RayParams(
            node_ip_address=settings.host or _find_own_address(head_address),
            gcs_address=head_address,
            gcs_server_port=settings.port if settings.is_head else None,
            num_cpus=os.cpu_count() or 1,
            resources=dict(settings.resources),
            object_store_memory=_OBJECT_STORE_BYTES,
            temp_dir=os.path.join(self.folder, RAY_FOLDER),
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            _system_config=_SYSTEM_CONFIG if settings.is_head else None,
        )
        self.ray_node = QuietNode(
            parameters, head=settings.is_head, shutdown_at_exit=False, spawn_reaper=True
        )
        if settings.is_head:
            self.client = _raylet.GcsClient(address=self.ray_node.gcs_address)
            self.client.internal_kv_put(_SPEC, settings.spec.encode(), True, _NAMESPACE)
        elif settings.is_visitor:
            self._become_coordinator(self.ray_node.node_id.encode())
        self.program.report(NodeState.UP, self.ray_node.gcs_address)

    def _await_head(self, address: str) -> str:
        """Waits until the head listens at its address; returns its IP address and port."""
        settings = self.settings
        deadline = time.monotonic() + settings.timeout
        while (found := _find_listener(address)) is None:
            if time.monotonic() > deadline:
                raise Refusal(
                    f"{settings.task} waited {settings.timeout:g} s for {settings.head} at "
                    f"{address}, which does not answer. Start it, or check that its address can be "
                    "reached from here."
                )
            time.sleep(_POLL_SECONDS)
        return found

    def _check_membership(self) -> None:
        """Raises Refusal if the cluster is another one, or has this task already."""
        settings = self.settings
        deadline = time.monotonic() + min(self.limits.claim, settings.timeout)
        while (spec := self.client.internal_kv_get(_SPEC, _NAMESPACE, self.limits.call)) is None:
            if time.monotonic() > deadline:
                raise Refusal(f"{settings.head} is a Ray cluster that is not distribax's.")
            time.sleep(_POLL_SECONDS)
        if spec.decode() != settings.spec:
            raise Refusal(
                f"{settings.task} and {settings.head} have different cluster specs: "
                f"{settings.spec} and {spec.decode()}. Give every task the same one."
            )
        while owners := self._list_members(settings.resources):
            if time.monotonic() > deadline:
                raise Refusal(
                    f"{settings.task} is part of the cluster already, at {owners[0]}. Each task is "
                    "one process: end that one first, or give this one its own task_index."
                )
            time.sleep(_POLL_SECONDS)

    def _become_coordinator(self, own: bytes) -> None:
        """Raises Refused if another program is the coordinator: it would end with this one."""
        deadline = time.monotonic() + self.limits.claim
        where = (_NAMESPACE, self.limits.call)
        while not self.client.internal_kv_put(_COORDINATOR, own, False, *where):
            holder = self.client.internal_kv_get(_COORDINATOR, *where)
            nodes = self.client.get_all_node_info(timeout=self.limits.call).items()
            alive = [number.hex().encode() for number, node in nodes if node.state == node.ALIVE]
            has_ended = self.client.internal_kv_get(_ENDED, *where)
            if has_ended or time.monotonic() > deadline:
                raise Refusal(
                    "the cluster has a coordinator already, another program, and ends with that "
                    "one. Start the servers and this program again when it has ended."
                )
            if holder is not None and holder not in alive:
                self.client.internal_kv_del(_COORDINATOR, False, *where)
            else:
                time.sleep(_POLL_SECONDS)

    def _list_members(self, resources: Mapping[str, float] | None = None) -> list[str]:
        """Returns the addresses of the live nodes; only of those that have one of the resources."""
        return [
            node.node_manager_address
            for node in self.client.get_all_node_info(timeout=self.limits.call).values()
            if node.state == node.ALIVE
            and (resources is None or resources.keys() & dict(node.resources_total).keys())
        ]

    def watch(self) -> str:
        """Waits until the cluster has ended, and returns why.

        Raises:
            Lost: The head is out of reach, or has given up this node, whose processes then end; or
                one of the head's own processes has ended.
        """
        last_seen = time.monotonic()
        while True:
            time.sleep(_POLL_SECONDS)
            if dead := self.ray_node.dead_processes():
                raise Lost(f"the process {dead[0][0]} has ended unexpectedly")
            try:
                if self.client.internal_kv_get(_ENDED, _NAMESPACE, self.limits.call):
                    self.has_ended = True
                    return "the coordinator has ended the cluster"
                last_seen = time.monotonic()
            except Exception as error:
                if time.monotonic() - last_seen > self.limits.head_lost:
                    raise Lost(f"{self.settings.head} is out of reach ({error})") from error

    def leave(self, *, end_cluster: bool = False, is_over: bool = False) -> None:
        """Ends Ray's processes here and removes their folder; a second caller only waits.

        Args:
            end_cluster: Whether to end the whole cluster.
            is_over: Whether the program of this node has ended it, and with a head the cluster;
                one that has failed is replaced by another one, which needs the snapshots.
        """
        with self._leaving:
            if self._has_left:
                return
            self._has_left = True
            is_head_over = is_over and self.settings.is_head and not self.has_failed
            is_over = end_cluster or self.has_ended or is_head_over
            if not is_over:
                self._await_snapshots()
            if is_over and self.client is not None:
                with contextlib.suppress(Exception):
                    self.client.internal_kv_put(_ENDED, b"1", True, _NAMESPACE, self.limits.call)
            if is_over and self.settings.is_head and self.client is not None:
                self._await_farewells()
            elif self.ray_node is not None:
                # The raylet tells the head that it leaves: the task can be started again at once.
                with contextlib.suppress(Exception):
                    self.ray_node.kill_all_processes(check_alive=False, allow_graceful=True)
            _kill_descendants(self.limits.kill)
            shutil.rmtree(self.folder, ignore_errors=True)
            if is_over:
                shutil.rmtree(os.environ[SNAPSHOT_FOLDER_VARIABLE], ignore_errors=True)

    def _await_snapshots(self) -> None:
        """Has the parameter servers here save what they hold, for those that replace them."""
        import psutil

        deadline = time.monotonic() + self.limits.save
        with contextlib.suppress(OSError):
            open(os.path.join(self.folder, LEAVING_NAME), "w").close()
            names = [name for name in os.listdir(self.folder) if name.startswith(SERVING_PREFIX)]
            while time.monotonic() < deadline and any(
                psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
                for pid in (int(name.removeprefix(SERVING_PREFIX)) for name in names)
            ):
                time.sleep(_POLL_SECONDS / 5)

    def _await_farewells(self) -> None:
        """Waits until the other nodes have noticed the end of the cluster and have left."""
        deadline = time.monotonic() + self.limits.farewell
        with contextlib.suppress(Exception):
            while len(self._list_members()) > 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 5)


def _find_listener(address: str) -> str | None:
    """Returns the address, with an IP address as the host, if a process listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as connection:
            found = connection.getpeername()[0]
    except OSError:
        return None
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _find_own_address(head_address: str | None) -> str:
    """Returns the address from which this machine reaches the head."""
    assert head_address is not None
    host, _, port = head_address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0) as connection:
        return str(connection.getsockname()[0])


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends, so that none escapes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants(seconds: float) -> None:
    import psutil  # Ray depends on it.

    deadline = time.monotonic() + seconds
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
    _, folder, parent, settings, limits = sys.argv
    # Ctrl-C and hang-ups are for the program; this process notices when the program ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    program = ParentProgram(int(parent))
    with open(os.path.join(folder, LOG_NAME), "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _adopt_orphans()
    node = NodeProcesses(
        NodeSettings(**json.loads(settings)), NodeLimits(**json.loads(limits)), folder, program
    )

    def leave_with_program() -> None:
        node.leave(end_cluster=program.wait(), is_over=True)
        os._exit(0)

    threading.Thread(target=leave_with_program, name="program-watch", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        node.start()
        program.report(NodeState.ENDED, node.watch())
    except Refusal as refusal:
        program.report(NodeState.REFUSED, str(refusal))
    except Lost as loss:
        node.has_failed = True  # First: upon the report, the program closes the node.
        program.report(NodeState.LOST, str(loss))
    except Exception as error:
        node.has_failed = True
        program.report(NodeState.FAILED, f"{type(error).__name__}: {error}")
    finally:
        node.leave()


if __name__ == "__main__":
    main()

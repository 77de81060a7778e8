"""Ray does not end, as one of its processes is stopped or dead: the program does all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distribax.cluster.ray.cluster_token import make_token
from tests.multiprocess.marked_programs import MarkedPrograms, marked_programs

# Each starts a Ray cluster and waits for time limits: `make chaos` runs them.
pytestmark = [pytest.mark.multiprocess, pytest.mark.chaos]

_TELL = """
import json, logging, os, signal, sys, time
import psutil
import distribax as dx
from distribax.cluster.ray import ray_session

def tell(**what):
    print(json.dumps(what), flush=True)

logging.basicConfig(level=logging.WARNING, format="%(message)s")

def strike(name, number):
    for process in psutil.Process().children(recursive=True):
        if process.name() == name:
            process.send_signal(number)
            return
    raise AssertionError(name)

def start(**options):
    strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1, **options)
    coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
    assert coordinator.schedule(int).fetch() == 0
    return strategy, coordinator

def list_own():
    # The processes of Ray that this program has started itself, without a keeper.
    return [each.name() for each in psutil.Process().children() if each.name() != "python"]
"""

_ONE_AFTER_THE_OTHER = (
    _TELL
    + """
for name in ("raylet", "gcs_server"):
    strategy, _ = start()
    strike(name, signal.SIGSTOP)
    strategy.close()
    tell(closed=name, left=len(psutil.Process().children()))

strategy, coordinator = start()
strike("gcs_server", signal.SIGKILL)
while ray_session.get_epoch() is not None:
    time.sleep(0.01)
paths = strategy.snapshot()
tell(saved=len(paths), epoch=ray_session.get_epoch(), own=list_own())
strike("raylet", signal.SIGKILL)
while ray_session.get_epoch() is not None:
    time.sleep(0.01)
strategy.close()
tell(closed="restarting", left=len(psutil.Process().children()))
strategy, _ = start()
strategy.close()
tell(closed="healthy", left=len(psutil.Process().children()))
"""
)

_WHEREVER = (
    _TELL
    + """
import threading
class Closer(logging.Handler):
    # Closes a strategy when something is logged, in the thread that does.
    def __init__(self, text, strategy):
        super().__init__()
        self._text, self._strategy = text, strategy
        self.begun, self.ended = threading.Event(), threading.Event()
        logging.getLogger().addHandler(self)

    def emit(self, record):
        if self._text in record.getMessage():
            logging.getLogger().removeHandler(self)
            self.begun.set()
            try:
                self._strategy.close()
            finally:
                self.ended.set()

(first, _), (second, _), (third, coordinator) = start(), start(), start()
while "pid" not in first.server_status()[0]:
    time.sleep(0.05)
closer = Closer("Parameter server 0 has died", first)
os.kill(first.server_status()[0]["pid"], signal.SIGKILL)
closer.ended.wait()
tell(closed="by a handler, when a server had died")
strike("raylet", signal.SIGKILL)
while ray_session.get_epoch() is not None:
    time.sleep(0.01)
second.close()
tell(closed="one of two, while Ray was started again", result=coordinator.schedule(int).fetch())
closer = Closer("Ray is started again", third)
strike("gcs_server", signal.SIGKILL)
closer.begun.wait()
third.close()
closer.ended.wait()
tell(closed="twice at once", left=len(psutil.Process().children()))
"""
)

_OWNER = (
    _TELL
    + """
from distribax.cluster.ray.node import RayNode
from distribax.cluster.ray.node_main import NodeSettings
node = RayNode(NodeSettings(os.environ["RAY_AUTH_TOKEN"]))
tell(address=node.wait_until_up())
sys.stdin.readline()
strike("raylet", signal.SIGSTOP)
tell(stopped=True)
sys.stdin.readline()
node.close()
"""
)

_GUEST = (
    _TELL
    + """
strategy, _ = start(address=sys.argv[1])
tell(started=True)
sys.stdin.readline()
strategy.close()
tell(closed=True)
try:
    start(address=sys.argv[1])
except RuntimeError as error:
    tell(error=str(error))
"""
)


@pytest.fixture
def programs() -> Iterator[MarkedPrograms]:
    with marked_programs() as programs:
        yield programs


# Takes more than 10 s: Ray is started five times.
def test_clusters_end_whatever_has_happened_to_ray(programs: MarkedPrograms) -> None:
    program = programs.start(_ONE_AFTER_THE_OTHER, DISTRIBAX_RAY_SHUTDOWN_SECONDS="3")
    for name in ("raylet", "gcs_server"):
        assert program.hear() == {"closed": name, "left": 0}
    # Nobody who called Ray while it was started again has started another one.
    assert program.hear() == {"saved": 1, "epoch": 1, "own": []}
    assert program.hear() == {"closed": "restarting", "left": 0}
    assert program.hear() == {"closed": "healthy", "left": 0}
    code, _, err = program.finish()
    assert code == 0, err
    assert "Ray has not shut down within 3 s: the process gcs_server runs, the process " in err
    assert "the process raylet is stopped. Its processes are killed." in err
    assert "the process gcs_server is stopped" in err
    assert "Token authentication is" not in err
    assert programs.left() == []


# Takes more than 10 s: Ray is started twice, with six actors.
def test_strategies_are_closed_by_whatever_thread_and_whenever(programs: MarkedPrograms) -> None:
    program = programs.start(_WHEREVER)
    assert program.hear() == {"closed": "by a handler, when a server had died"}
    assert program.hear() == {"closed": "one of two, while Ray was started again", "result": 0}
    assert program.hear() == {"closed": "twice at once", "left": 0}
    code, _, err = program.finish()
    assert code == 0 and "Traceback" not in err, err
    assert programs.left() == []


# Takes more than 10 s: it waits for the time limit.
def test_a_program_ends_that_cannot_leave_a_cluster_of_others(programs: MarkedPrograms) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": make_token()}
    owner = programs.start(_OWNER, **token)
    address = owner.hear()["address"]
    guest = programs.start(_GUEST, address, **token, DISTRIBAX_RAY_SHUTDOWN_SECONDS="3")
    assert guest.hear() == {"started": True}
    owner.say()
    assert owner.hear() == {"stopped": True}
    guest.say()
    assert guest.hear() == {"closed": True}
    assert "only be used again by another process" in guest.hear()["error"]
    code, _, err = guest.finish()
    assert code == 0, err
    assert "Ray could not be shut down in this process: the node of this machine does not" in err
    owner.say()
    assert owner.finish()[0] == 0

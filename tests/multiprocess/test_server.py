"""`dx.Server` with real processes: a cluster of tasks, each a node of Ray."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest

from distribax.cluster.ray.cluster_token import make_token
from distribax.cluster.ray.ports import find_quiet_ports
from distribax.cluster.ray.server import ClusterLostError
from distribax.types import PEER_LOST_EXIT_CODE
from tests.multiprocess.marked_programs import MarkedPrograms, marked_programs
from tests.process_forks import WITHOUT

pytestmark = pytest.mark.multiprocess

ACTORS = """
import json, os, sys, time
import distribax as dx
from distribax.cluster import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from distribax.cluster.ray import engine

class Actor:
    def ask(self):
        return {"pid": os.getpid(), "folder": os.environ["DISTRIBAX_NODE_FOLDER"]}

def start(options):
    import ray
    return ray.remote(Actor).options(**options).remote()

def tell(**what):
    print(json.dumps(what), flush=True)
"""

IN_ONE_PROGRAM = (
    ACTORS
    + """
import psutil
ports = iter(sys.argv[1:])
spec = ClusterSpec({"worker": [f"localhost:{next(ports)}"], "ps": [f"127.0.0.1:{next(ports)}"]})
servers = [dx.Server(spec, "worker", 0), dx.Server(spec, job_name="ps")]
servers[0].start()
e = engine.from_resolver(SimpleClusterResolver(spec), 90)
import ray
actors = [start(e.make_worker_options(0)), start(e.make_server_options(0))]
places = [ray.get(actor.ask.remote(), timeout=300)["folder"] for actor in actors]
mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
sockets = [c for p in mine for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
tell(target=servers[0].target, places=places, hosts=sorted({s.laddr.ip for s in sockets}),
     own=str(e.get_snapshot_folder()), early=[server.join(0.1) for server in servers])
e.close()
tell(ended=[server.join(30) for server in servers])
with dx.Server.create_local_server() as local:
    tell(target=local.target, early=local.join(0.01))
"""
)

CHIEF = (
    ACTORS
    + """
import ray
e = engine.from_resolver(engine.detect_resolver(), 90)
worker = start(e.make_worker_options(0))
first = ray.get(worker.ask.remote(), timeout=300)
tell(folder=first["folder"])
sys.stdin.readline()
while True:
    time.sleep(0.1)
    try:
        again = ray.get(worker.ask.remote(), timeout=300)
        if again["pid"] != first["pid"]:
            break
    except ray.exceptions.RayActorError:
        pass
tell(folder=again["folder"])
sys.stdin.readline()
"""
)

SERVER = (
    ACTORS
    + """
server = dx.Server(TFConfigClusterResolver())
tell(target=server.target)
try:
    tell(ended=server.join())
except RuntimeError as error:
    tell(error=str(error))
"""
)


LOST = (
    ACTORS
    + """
import contextlib, psutil
from distribax.cluster.ray.cluster_token import get_process_token
from distribax.cluster.ray.node import RayNode
from distribax.cluster.ray.task_nodes import make_node_settings

chief, worker = (f"127.0.0.1:{port}" for port in sys.argv[1:])
spec = ClusterSpec({"chief": [chief], "worker": [worker]})
head = RayNode(make_node_settings(spec, "chief", 0, get_process_token(), 300))
head.wait_until_up()
server = dx.Server(spec, "worker", 0)
server._node.wait_until_up()
for process in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.Error):
        if str(head.folder) in " ".join(process.cmdline()):
            process.kill()
server.join()
"""
)


@pytest.fixture
def programs() -> Iterator[MarkedPrograms]:
    with marked_programs() as programs:
        yield programs


def test_servers_and_coordinator_in_one_program(programs: MarkedPrograms) -> None:
    ports = find_quiet_ports(2)
    program = programs.start(IN_ONE_PROGRAM, *map(str, ports), **WITHOUT)
    told = program.hear()
    assert told["target"] == f"grpc://localhost:{ports[0]}"
    # Each has its own node, and none is the coordinator's.
    assert len({*told["places"], told["own"].removesuffix("/snapshots")}) == 3
    assert set(told["hosts"]) <= {"127.0.0.1", "::ffff:127.0.0.1"} and told["hosts"]
    assert told["early"] == [False, False]
    assert program.hear() == {"ended": [True, True]}
    local = program.hear()
    assert local["target"].startswith("grpc://localhost:") and local["early"] is False
    code, _, err = program.finish()
    assert code == 0, err
    assert programs.left() == []


class Cluster:
    """Starts the tasks of a cluster, each with its TF_CONFIG and the token."""

    def __init__(self, programs: MarkedPrograms) -> None:
        chief, worker, ps = (f"127.0.0.1:{port}" for port in find_quiet_ports(3))
        self.cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
        self.token = make_token()
        self._programs = programs

    def start(self, program: str, job: str, **changes: str):
        config = {"cluster": self.cluster, "task": {"type": job, "index": 0}}
        environment = {"TF_CONFIG": json.dumps(config), "RAY_AUTH_TOKEN": self.token} | changes
        return self._programs.fork(program, **environment)


# Takes more than 10 s: six nodes of Ray start one after the other.
def test_servers_die_and_come_back_and_end_with_the_chief(programs: MarkedPrograms) -> None:
    cluster = Cluster(programs)
    stranger = cluster.start(SERVER, "worker", RAY_AUTH_TOKEN="a wrong one")
    stranger.hear()
    ps = cluster.start(SERVER, "ps")
    ps.hear()
    chief = cluster.start(CHIEF, "chief")
    assert "worker 0: the cluster has another token" in stranger.hear()["error"]
    assert stranger.finish()[0] == 0

    first = cluster.start(SERVER, "worker")
    first.hear()
    before = chief.hear()["folder"]
    code, _, err = cluster.start(SERVER, "worker").finish()
    assert code == 1 and "worker 0 cannot have its address" in err and "it is in use" in err

    address = cluster.cluster["worker"][0]
    other = {**cluster.cluster, "worker": [address, "127.0.0.1:1"]}
    other["worker"].reverse()
    config = {"cluster": other, "task": {"type": "worker", "index": 1}}
    first.process.kill()
    # Until it has ended, it has the address.
    first.process.wait()
    liar = cluster.start(SERVER, "worker", TF_CONFIG=json.dumps(config))
    liar.hear()
    assert "worker 1 and chief 0 have different cluster specs" in liar.hear()["error"]
    assert liar.finish()[0] == 0

    second = cluster.start(SERVER, "worker")
    second.hear()
    chief.say()
    assert chief.hear()["folder"] != before

    chief.process.kill()
    assert second.hear() == {"ended": True} and ps.hear() == {"ended": True}
    assert second.finish()[0] == 0 and ps.finish()[0] == 0
    chief.finish()
    assert programs.left() == []


def test_a_server_that_has_lost_its_cluster_ends_with_a_code_of_its_own(
    programs: MarkedPrograms,
) -> None:
    limits = {"DISTRIBAX_HEAD_LOST_SECONDS": "1", "DISTRIBAX_SERVER_REJOIN_SECONDS": "2"}
    program = programs.start(LOST, *map(str, find_quiet_ports(2)), **limits)
    code, _, err = program.finish()
    assert code == PEER_LOST_EXIT_CODE, err
    assert "worker 0 has lost its cluster" in err and "tries to join again for 2 s" in err
    assert "could not join again: worker 0 waited 2 s for chief 0" in err


def test_a_lost_cluster_survives_pickling() -> None:
    error = ClusterLostError("worker 0 has lost its cluster")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.code) == (error.reason, PEER_LOST_EXIT_CODE)

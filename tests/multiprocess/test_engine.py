"""Ray as the engine: started and ended with a program, or somebody else's."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distribax.cluster.ray import engine
from distribax.cluster.ray.cluster_token import make_token
from distribax.cluster.ray.node import RayNode
from distribax.cluster.ray.node_main import NodeSettings
from distribax.cluster.ray.ports import find_quiet_ports
from tests.conftest import RunFresh
from tests.multiprocess.marked_programs import MarkedPrograms, marked_programs
from tests.process_forks import WITHOUT

pytestmark = pytest.mark.multiprocess

ACTORS = """
import json, os, sys
from distribax.cluster.ray import engine

class Actor:
    def ask(self):
        return {"pid": os.getpid(), "threads": os.environ.get("PJRT_NPROC"),
                "platform": os.environ.get("JAX_PLATFORMS"),
                "tunables": os.environ.get("GLIBC_TUNABLES")}

def start(options):
    import ray
    return ray.remote(Actor).options(**options).remote()

def await_end(actor):
    # It is told to end, and does so a little later.
    import ray
    try:
        while True:
            ray.get(actor.ask.remote(), timeout=300)
    except ray.exceptions.RayActorError:
        pass

def tell(**what):
    print(json.dumps(what), flush=True)
"""

EMBEDDED = (
    ACTORS
    + """
import signal, subprocess
import psutil

before = dict(os.environ), signal.getsignal(signal.SIGTERM)
first, second = engine.start_embedded(2, 1), engine.start_embedded(1, 1)
assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
import ray

workers = [start(first.make_worker_options(i)) for i in range(2)]
other = start(second.make_server_options(0))
answers = ray.get([actor.ask.remote() for actor in [*workers, other]], timeout=300)
named = ray.get_actor("worker-1", namespace=first.namespace)
assert ray.get(named.ask.remote(), timeout=300) == answers[1]

mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
sockets = [c for p in mine for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
intruder = "from ray._raylet import GcsClient; import sys; GcsClient(address=sys.argv[1])"
address = ray.get_runtime_context().gcs_address
refused = subprocess.run([sys.executable, "-c", intruder, address], capture_output=True, text=True)

first.close()
first.close()
rest = ray.get(other.ask.remote(), timeout=300)["pid"]
await_end(workers[0])
folder = second.get_snapshot_folder()
modes = [path.stat().st_mode & 0o777 for path in folder.parent.parent.glob("*")]
tell(answers=answers, modes=modes, rest=rest, hosts=sorted({s.laddr.ip for s in sockets}),
     refused=refused.stderr, folder=str(folder), server=second.get_server_host(0))
second.close()
assert not ray.is_initialized()

third = engine.start_embedded()
ray.get(start(third.make_worker_options(0)).ask.remote(), timeout=300)
"""
)

KILLED = (
    ACTORS
    + """
import ray, signal, time
e = engine.start_embedded(2, 1)
workers = [start(e.make_worker_options(i)) for i in range(2)]
pids = [ray.get(worker.ask.remote(), timeout=300)["pid"] for worker in workers]
os.kill(pids[0], signal.SIGSTOP)
tell(pids=pids)
time.sleep(100)
"""
)

ELSEWHERE = (
    ACTORS
    + """
import ray
address = sys.argv[1]
e = engine.from_address(address, 1, 1)
pid = ray.get(start(e.make_worker_options(0)).ask.remote(), timeout=300)["pid"]
many = engine.from_address(address, 500, 1)
tell(cpus=[x.make_worker_options(0)["num_cpus"] for x in (e, many)], host=e.get_server_host(0))
try:
    engine.from_address("127.0.0.1:1")
except RuntimeError as error:
    tell(error=str(error))
e.close()
many.close()
assert not ray.is_initialized()

# A connection that the program has made itself is used, and left alone.
ray.init(address, logging_level="error", log_to_driver=False)
mine = engine.start_embedded(1, 1)
worker = start(mine.make_worker_options(0))
ray.get(worker.ask.remote(), timeout=300)
try:
    engine.from_resolver(engine.detect_resolver())
except RuntimeError as error:
    tell(error=str(error))
mine.close()
await_end(worker)
tell(initialized=ray.is_initialized(), host=mine.get_server_host(0))

# Nothing that is closed later starts another Ray.
late = engine.start_embedded(1, 1)
ray.shutdown()
late.close()
tell(initialized=ray.is_initialized())
"""
)


@pytest.fixture
def programs() -> Iterator[MarkedPrograms]:
    with marked_programs() as programs:
        yield programs


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, str]]:
    """Gives the address and the token of a Ray cluster that is not the engine's."""
    token = make_token()
    node = RayNode(NodeSettings(token))
    try:
        yield str(node.wait_until_up()), token
    finally:
        node.close()


def _shared_memory() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("*") if path.name[:6] in ("plasma", "ray")]


# Takes more than 10 s: Ray starts twice, with four actors in all, and an intruder imports it.
def test_embedded_is_this_machines_alone_and_ends_with_the_program(
    programs: MarkedPrograms,
) -> None:
    of_the_user = "glibc.malloc.check=0"
    program = programs.start(EMBEDDED, GLIBC_TUNABLES=of_the_user, **WITHOUT)
    code, out, err = program.finish()
    assert (code, err) == (0, "")
    assert programs.left() == [] and _shared_memory() == []
    told = json.loads(out)
    assert len({answer["pid"] for answer in told["answers"]} - {program.pid}) == 3
    cores = len(os.sched_getaffinity(0))
    assert [answer["threads"] for answer in told["answers"][:2]] == [str(max(1, cores // 2))] * 2
    assert told["answers"][2]["platform"] == "cpu"
    for answer in told["answers"]:
        assert re.fullmatch(rf"glibc\..*threshold=\d+:{of_the_user}", answer["tunables"])
    assert told["rest"] == told["answers"][2]["pid"]
    assert set(told["hosts"]) <= {"127.0.0.1", "::ffff:127.0.0.1"} and told["hosts"]
    assert "AuthenticationError" in told["refused"]
    assert Path(told["folder"]).is_relative_to(programs.folder)
    # Whatever Ray does to its own folder, which is in it.
    assert told["modes"] == [0o700]
    assert told["server"] == "127.0.0.1"


def test_nothing_is_left_of_a_program_that_is_killed(programs: MarkedPrograms) -> None:
    program = programs.start(KILLED, **WITHOUT)
    pids = program.hear()["pids"]
    assert {program.pid, *pids} <= programs.processes().keys()
    program.process.kill()
    # One of the workers is stopped: it cannot notice anything by itself.
    assert programs.left() == [] and _shared_memory() == []


def test_a_ray_cluster_that_is_there(programs: MarkedPrograms, cluster: tuple[str, str]) -> None:
    address, token = cluster
    port = find_quiet_ports(1)[0]
    tf_config = {
        "cluster": {
            "chief": [f"127.0.0.1:{port}"],
            "worker": ["127.0.0.1:2"],
            "ps": ["127.0.0.1:3"],
        },
        "task": {"type": "chief", "index": 0},
    }
    program = programs.fork(
        ELSEWHERE,
        address,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=token,
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        TF_CONFIG=json.dumps(tf_config),
    )
    told = program.hear()
    cores = os.cpu_count() or 1
    assert told == {"cpus": [1 if cores >= 2 else 0, 0], "host": None}
    assert f"connected to the Ray cluster at {address} already" in program.hear()["error"]
    assert "connected to a Ray cluster already" in program.hear()["error"]
    assert program.hear() == {"initialized": True, "host": None}
    assert program.hear() == {"initialized": False}
    assert program.finish()[0] == 0


def test_training_on_a_ray_cluster_that_is_there(
    cluster: tuple[str, str], run_forked: RunFresh
) -> None:
    program = f"""
        import os
        import signal
        import time
        from pathlib import Path

        os.environ |= dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN={cluster[1]!r})
        import distribax as dx

        strategy = dx.ParameterServerStrategy(address={cluster[0]!r}, num_workers=2, num_ps=1)
        coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
        with strategy.scope():
            v = dx.Variable(0.0)
        for _ in range(20):
            coordinator.schedule(lambda: v.assign_add(1.0))
        coordinator.join()
        assert float(v) == 20.0
        # A death is the coordinator's to tell, not Ray's: nothing is printed.
        os.kill(coordinator.status().workers[0].pid, signal.SIGKILL)
        for _ in range(20):
            coordinator.schedule(time.sleep, args=(0.05,))
        coordinator.join()
        (path,) = map(Path, strategy.snapshot())
        assert path.exists()
        strategy.close()
        # The cluster stays; the folder, three levels up, was made for this strategy.
        assert not path.parents[2].exists(), path
        print("done")
    """
    assert run_forked(program) == "done"


def test_address_without_a_cluster(cluster: tuple[str, str], run_forked: RunFresh) -> None:
    # In a process of its own: one that other tests have connected to Ray answers otherwise.
    program = f"""
        import os
        import pytest
        from distribax.cluster.ray import engine

        with pytest.raises(RuntimeError, match=r"address='127.0.0.1:1': no Ray .* within 0.1 s"):
            engine.from_address("127.0.0.1:1", timeout=0.1)
        with pytest.raises(ValueError, match="the coordinator must be on a machine of the Ray"):
            engine.from_address("ray://127.0.0.1:10001")
        with pytest.raises(ValueError, match="the port is missing"):
            engine.from_address("localhost")
        os.environ |= dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a wrong one")
        with pytest.raises(RuntimeError, match="has another token"):
            engine.from_address({cluster[0]!r})
        print("done")
    """
    assert run_forked(program) == "done"


def test_without_ray(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'distribax\[ray\]'"):
        engine.start_embedded()

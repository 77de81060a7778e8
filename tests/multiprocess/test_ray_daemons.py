"""Ray's own processes die under a program: it goes on, and ends as a program should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from distribax.cluster.ray.cluster_token import make_token
from distribax.cluster.ray.ports import find_quiet_ports
from tests.multiprocess.marked_programs import MarkedPrograms, Program, marked_programs
from tests.multiprocess.server_machines import COORDINATOR_HERE, SERVER_HERE, kill_processes

# Each starts a Ray cluster and waits for time limits: `make chaos` runs them.
pytestmark = [pytest.mark.multiprocess, pytest.mark.chaos]

PROGRAM = """
import atexit, json, logging, sys, time
import psutil
import distribax as dx

def tell(**what):
    print(json.dumps(what), flush=True)

def kill(name):
    for process in psutil.Process().children(recursive=True):
        if name in " ".join(process.cmdline()[:3]):
            process.kill()
            return

atexit.register(tell, atexit=True)
logging.basicConfig(level=logging.WARNING, format="%(message)s")
strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1)
coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
with strategy.scope():
    v = dx.Variable(0.0)

def add():
    v.assign_add(1.0)

from distribax.cluster.ray import ray_session

for number, line in enumerate(sys.stdin):
    kill(line.strip())
    while ray_session.get_epoch() != number:
        time.sleep(0.1)
    for _ in range(3):
        coordinator.schedule(add)
    coordinator.join()
    strategy.snapshot()
    tell(total=float(v))
"""


@pytest.fixture
def programs() -> Iterator[MarkedPrograms]:
    with marked_programs() as programs:
        yield programs


# Takes more than 10 s: Ray is started four times.
def test_a_program_goes_on_when_processes_of_ray_die(programs: MarkedPrograms) -> None:
    program = programs.start(PROGRAM)
    totals = []
    for victim in ("nobody", "gcs_server", "raylet", "node_main.py"):
        program.say(victim)
        totals.append(program.hear()["total"])
    # What runs when Ray dies may run twice.
    assert all(after >= before + 3 for before, after in zip([0.0, *totals], totals, strict=False))
    code, out, err = program.finish()
    assert code == 0, err
    assert out.splitlines()[-1] == '{"atexit": true}'
    for reason in ("the process gcs_server has ended", "the process raylet has ended"):
        assert reason in err
    assert err.count("Ray has been started again.") == 3
    assert programs.left() == []


def _ask(program: Program, command: str) -> Any:
    program.say(command)
    while "answer" not in (told := program.hear()):
        pass
    return told["answer"]


# Takes more than 10 s: Ray is started six times.
@pytest.mark.parametrize("victim", ["gcs_server", "raylet/raylet"])
def test_a_head_without_chief_is_started_again_in_place(
    programs: MarkedPrograms, victim: str
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in find_quiet_ports(2)]
    spec = {"ps": addresses[:1], "worker": addresses[1:]}
    shared = {"RAY_AUTH_TOKEN": make_token(), "DISTRIBAX_HEAD_LOST_SECONDS": "5"}

    def start(source: str, **task: Any) -> Program:
        config = {"cluster": spec} | task
        return programs.start(source, TF_CONFIG=json.dumps(config), **shared)

    head = start(SERVER_HERE, task={"type": "ps", "index": 0})
    worker = start(SERVER_HERE, task={"type": "worker", "index": 0})
    coordinator = start(COORDINATOR_HERE)
    assert _ask(coordinator, "add 3 0")["total"] == 3
    if victim == "gcs_server":
        # A second one would be ended with the first.
        code, _, err = start(COORDINATOR_HERE).finish()
        assert code == 1 and "the cluster has a coordinator already" in err
    _ask(coordinator, "snapshot")
    assert kill_processes(head, victim)
    assert _ask(coordinator, "recovered 1") == {"workers": [0]}
    assert _ask(coordinator, "add 3 0")["total"] >= 6
    coordinator.say("end")
    assert coordinator.finish()[0] == 0
    for program in (head, worker):
        code, out, err = program.finish()
        assert code == 0, err
        assert out.splitlines()[-1] == '{"ended": true}'
    assert programs.left() == []

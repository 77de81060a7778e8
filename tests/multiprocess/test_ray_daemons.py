"""Ray's own processes die under a program: it goes on, and ends as a program should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.marked_programs import MarkedPrograms, marked_programs

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

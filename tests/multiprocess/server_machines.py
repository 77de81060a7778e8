"""A parameter-server cluster whose tasks run on machines of their own, as network namespaces."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distribax.cluster.ray.cluster_token import make_token
from tests.multiprocess.machines import ENTER, Machine, machines
from tests.multiprocess.marked_programs import MarkedPrograms, Program, marked_programs

_TELL = """
import json, logging, os, sys, time

def tell(**what):
    print(json.dumps(what), flush=True)

class Teller(logging.Handler):
    def emit(self, record):
        tell(log=record.getMessage())

logging.getLogger("distribax").addHandler(Teller(logging.WARNING))
import distribax as dx
"""

SERVER = (
    ENTER
    + _TELL
    + """
tell(ended=dx.Server(dx.cluster_resolver.TFConfigClusterResolver()).join())
"""
)

CHIEF = (
    ENTER
    + _TELL
    + """
resolver = dx.cluster_resolver.TFConfigClusterResolver()
strategy = dx.ParameterServerStrategy(resolver, snapshot_interval=3600.0, server_timeout=10.0)
coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none", worker_timeout=10.0)
with strategy.scope():
    v = dx.Variable(0.0)
history = None
marked = 0

def add(seconds):
    v.assign_add(1.0)
    time.sleep(seconds)
    return dx.coordinator.experimental_get_current_worker_index()

def is_ready():
    return all(worker.state == "ready" for worker in coordinator.status().workers)

def mark(count, seconds):
    global history, marked
    from distribax.testing import History
    history = history or History(coordinator, 2000)
    for _ in range(count):
        history.schedule(marked)
        coordinator.schedule(time.sleep, args=(seconds,))
        marked += 1
    coordinator.join()
    return {"lost": len(history.lost()), "duplicates": history.duplicates}

def do(command, *arguments):
    if command == "mark":
        return mark(int(arguments[0]), float(arguments[1]))
    if command == "add":
        count, seconds = int(arguments[0]), float(arguments[1])
        done = [coordinator.schedule(add, args=(seconds,)) for _ in range(count)]
        coordinator.join()
        return {"total": float(v), "workers": sorted({one.fetch() for one in done})}
    if command == "snapshot":
        return {"paths": strategy.snapshot()}
    if command == "counted":
        while sum(strategy.servers[0].counts.values()) < int(arguments[0]):
            time.sleep(0.1)
        return {}
    if command == "ready":
        while not is_ready():
            time.sleep(0.1)
        return {}
    if command == "lost":
        while strategy.servers[0].restarts < int(arguments[0]):
            time.sleep(0.1)
        return {"lost": strategy.servers[0].lost}

while (line := sys.stdin.readline().strip()) not in ("", "end"):
    tell(answer=do(*line.split()))
strategy.close()
tell(closed=True)
"""
)


@dataclass
class ServerMachines:
    """The programs of the tasks, and the machines that they run on."""

    chief: Program
    ps: Program
    workers: list[Program]
    machines: Sequence[Machine]
    programs: MarkedPrograms

    def ask(self, command: str) -> dict[str, Any]:
        """Has the coordinator do something; returns its answer."""
        self.chief.say(command)
        return self.hear_answer()

    def hear_answer(self) -> dict[str, Any]:
        """Waits for the coordinator's answer."""
        while "answer" not in (told := self.chief.hear()):
            pass
        answer: dict[str, Any] = told["answer"]
        return answer

    @property
    def ps_machine(self) -> Machine:
        return self.machines[1]

    def get_worker_machine(self, index: int) -> Machine:
        return self.machines[2 + index]


def hear_log(program: Program, text: str) -> str:
    """Waits until a program logs something with that text, and returns it."""
    while text not in (told := program.hear().get("log", "")):
        pass
    return str(told)


@contextlib.contextmanager
def server_machines(folder: Path, **environment: str) -> Iterator[ServerMachines]:
    """Yields a cluster with a chief, a parameter server and two workers on four machines."""
    with machines(4, folder) as made, marked_programs() as programs:
        addresses = [f"{machine.host}:7777" for machine in made]
        spec = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
        shared = {"RAY_AUTH_TOKEN": make_token()} | environment

        def start(source: str, machine: Machine, job: str, index: int = 0) -> Program:
            config = {"cluster": spec, "task": {"type": job, "index": index}}
            own = {"TF_CONFIG": json.dumps(config)} | machine.environment
            return programs.start(source, **shared, **own)

        ps = start(SERVER, made[1], "ps")
        workers = [start(SERVER, made[2 + index], "worker", index) for index in range(2)]
        chief = start(CHIEF, made[0], "chief")
        yield ServerMachines(chief, ps, workers, made, programs)


def kill_processes(program: Program, name: str) -> int:
    """Kills a program's descendants whose command has that name; returns how many."""
    own = psutil.Process(program.pid).children(recursive=True)
    victims = [each for each in own if any(name in part for part in _read_command(each))]
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    return len(victims)


def _read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()[:3]
    except psutil.Error:
        return []

"""A parameter-server cluster whose tasks run on machines of their own, as network namespaces."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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

SERVER_HERE = (
    _TELL
    + """
tell(ended=dx.Server(dx.cluster_resolver.TFConfigClusterResolver()).join())
"""
)
"""A server on the machine of the test itself."""

SERVER = ENTER + SERVER_HERE

COORDINATOR_HERE = (
    _TELL
    + """
import threading
import numpy as np
from distribax.cluster.ray import ray_session
from distribax.testing import History

resolver = dx.cluster_resolver.TFConfigClusterResolver()
interval = float(os.environ.get("DX_TEST_SNAPSHOT_SECONDS", "3600"))
strategy = dx.ParameterServerStrategy(resolver, snapshot_interval=interval, server_timeout=10.0)
coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none", worker_timeout=10.0)
with strategy.scope():
    v = dx.Variable(0.0)

def add(seconds):
    v.assign_add(1.0)
    time.sleep(seconds)
    return dx.coordinator.experimental_get_current_worker_index()

def look():
    v.numpy()
    return dx.coordinator.experimental_get_current_worker_index()

def read_clock():
    return time.time()

def is_ready():
    return all(worker.state == "ready" for worker in coordinator.status().workers)

def is_replaced(epoch, dead):
    workers = [worker.pid for worker in coordinator.status().workers]
    servers = [each.get("pid") for each in strategy.server_status()]
    now = ray_session.get_epoch()
    return now is not None and now >= epoch and not dead.intersection(workers + servers)

def recover(epoch, dead):
    # Until all have been replaced that are dead, and each worker has read from the server.
    until = time.monotonic() + 400
    while not (is_replaced(epoch, dead) and is_ready()):
        time.sleep(0.1)
        if time.monotonic() > until:
            return {"late": [str(coordinator.status().workers), strategy.server_status()]}
    seen = set()
    while len(seen) < len(coordinator.status().workers):
        seen |= {one.fetch() for one in [coordinator.schedule(look) for _ in range(10)]}
    return {"workers": sorted(seen)}

class Work(threading.Thread):
    # Schedules functions all the time, faults or not: a few always wait or run.
    def __init__(self):
        super().__init__(daemon=True)
        self.history = History(coordinator, 30000)
        self.safe = set()
        self.count = 0
        self.is_ended = False
        self.error = None
        self.start()

    def run(self):
        try:
            while not self.is_ended and self.count < self.history.size:
                status = coordinator.status()
                if status.queued + status.running < 40:
                    self.history.schedule(self.count)
                    coordinator.schedule(time.sleep, args=(0.1,))
                    self.count += 1
                time.sleep(0.03)
            coordinator.join()
        except BaseException as error:
            self.error = repr(error)
            raise

    def tell(self):
        status = coordinator.status()
        return {
            "epoch": ray_session.get_epoch(),
            "scheduled": self.count,
            "pending": status.queued + status.running,
            "finished": status.finished,
            "retried": status.retried,
            "error": self.error,
        }

    def list_returned(self):
        # As a user would know: the result is there.
        return {number for number, value in self.history.results.copy().items() if value.is_settled}

    def save(self):
        returned = self.list_returned()
        counts = self.history.counts
        strategy.snapshot()
        # Without what earlier faults have lost.
        self.safe |= {number for number in returned if counts[number]}
        return {"safe": len(self.safe)}

    def check(self):
        # First what has returned, then what is there: so nothing is missing that only comes later.
        returned = sorted(self.list_returned())
        now = time.monotonic()
        while any(each.answered < now for each in strategy.servers):
            time.sleep(0.1)
        counts = self.history.counts
        missing = {number for number in returned if counts[number] == 0}
        reported = sum(sum(each.lost_counts.values()) for each in strategy.servers)
        return {
            "returned": len(returned),
            "missing": len(missing),
            "unsafe": sorted(missing & self.safe),
            "reported": reported,
            "restarts": sum(each.restarts for each in strategy.servers),
            "duplicates": int(np.maximum(counts - 1, 0).sum()),
            **self.tell(),
        }

work = None

def do(command, *arguments):
    global work
    if command == "work":
        work = Work()
        return {}
    if command == "tell":
        return work.tell()
    if command == "save":
        return work.save()
    if command == "check":
        return work.check()
    if command == "finish":
        work.is_ended = True
        work.join()
        return work.check()
    if command == "recovered":
        return recover(int(arguments[0]), set(map(int, arguments[1:])))
    if command == "clock":
        return {"difference": coordinator.schedule(read_clock).fetch() - float(arguments[0])}
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
"""A coordinator on the machine of the test itself, that is told what to do."""

CHIEF = ENTER + COORDINATOR_HERE


SERVER_PROCESS = "ray::ServerActor"
"""How Ray names the process of a parameter server."""
WORKER_PROCESS = "ray::Worker"


@dataclass
class ServerMachines:
    """The programs of the tasks, and the machines that they run on."""

    chief: Program
    ps: Program
    workers: list[Program]
    machines: Sequence[Machine]
    programs: MarkedPrograms
    heard: list[str] = field(default_factory=list)
    """What the coordinator has logged meanwhile."""

    def ask(self, command: str) -> dict[str, Any]:
        """Has the coordinator do something; returns its answer."""
        self.chief.say(command)
        return self.hear_answer()

    def hear_answer(self) -> dict[str, Any]:
        """Waits for the coordinator's answer."""
        while "answer" not in (told := self.chief.hear()):
            self.heard.append(str(told.get("log")))
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


def kill_processes(program: Program, name: str) -> list[int]:
    """Kills a program's descendants whose command has that name; returns those that have ended."""
    victims = find_processes(program, name)
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    # The parent has to look for it; one that has not yet is a zombie.
    deadline = time.monotonic() + 30.0
    while alive := [each for each in victims if _is_alive(each)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)
    return [each.pid for each in victims]


def describe_end(program: Program) -> str:
    """Returns what a program has said at last, if it has ended."""
    return "it is running" if program.process.poll() is None else str(program.finish())


def find_processes(program: Program, name: str) -> list[psutil.Process]:
    """Returns a program's descendants whose command has that name."""
    own = psutil.Process(program.pid).children(recursive=True)
    return [each for each in own if any(name in part for part in _read_command(each))]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()[:3]
    except psutil.Error:
        return []

"""Clusters of training workers whose processes a test can stop, kill and look into."""

from __future__ import annotations

import subprocess
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distribax.testing import free_ports
from distribax.types import PEER_LOST_EXIT_CODE
from tests.environment import inherited
from tests.forked import ForkedProcess, start_forked
from tests.multiprocess.machines import ENTER, Machine
from tests.multiprocess.workers import describe_task

WAIT_SECONDS = 300

TRAINING = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
import distribax as dx

dx.set_virtual_cpu_devices(1)
strategy = dx.MultiWorkerMirroredStrategy()
worker = jax.process_index()
compiled = os.environ.get("COMPILED") == "True"
# JAX runs programs in a thread of their own, unless they are very small.
size = int(os.environ.get("SIZE", "4096"))
with strategy.scope():
    w = dx.Variable(jnp.zeros(size), aggregation="MEAN")

def step():
    def replica():
        w.assign_add(jnp.ones(size))
        return w.value().sum()
    return strategy.reduce("MEAN", strategy.run(replica), axis=None)

if compiled:
    step = dx.function(step)

def train(steps=10**9):
    for i in range(steps):
        step()
        if i == 10:
            print("ready", flush=True)
"""


@dataclass
class Worker:
    """A process of a cluster, with files for what it writes."""

    name: str
    process: ForkedProcess
    out_path: Path
    err_path: Path

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait(self) -> int:
        """Returns the exit code; a process that does not end is a failure of the test."""
        try:
            return self.process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} hangs:\n{self.out}{self.err}")

    def wait_until_says(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.out:
            assert time.monotonic() < deadline, f"{self.name}:\n{self.out}{self.err}"
            assert self.process.poll() is None, f"{self.name}:\n{self.out}{self.err}"
            time.sleep(0.02)

    def must_name(self, other: Worker, *words: str, code: int = PEER_LOST_EXIT_CODE) -> None:
        """Checks that it has ended with a report that names the other worker."""
        assert self.wait() == code, f"{self.name}: {self.process.returncode}\n{self.err}"
        named = f"distribax.errors.PeerLostError: {other.name} "
        line = next((line for line in self.err.splitlines() if line.startswith(named)), "")
        assert line, self.err
        for word in words:
            assert word in line, self.err


@dataclass
class Cluster:
    """Starts workers; what is left at the end is killed."""

    folder: Path
    workers: list[Worker] = field(default_factory=list)

    def start(
        self,
        program: str,
        num_workers: int = 2,
        *,
        before: str = "",
        machines: Sequence[Machine] = (),
        by_name: bool = False,
        **environment: str,
    ) -> list[Worker]:
        """Starts workers that run TRAINING and a program, with something else before both.

        If there are machines, each worker runs on one of its own, which the cluster knows by its
        address or by its name.
        """
        if machines:
            hosts = [machine.name if by_name else machine.host for machine in machines]
            addresses = [f"{host}:2222" for host in hosts]
            before = ENTER + textwrap.dedent(before)
        else:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        source = self.folder / "train.py"
        source.write_text(textwrap.dedent(before) + TRAINING + textwrap.dedent(program))
        self.workers = []
        for index in range(len(addresses)):
            own = machines[index].environment if machines else {}
            out, err = self.folder / f"{index}.out", self.folder / f"{index}.err"
            process = start_forked(
                source.read_text(),
                inherited() | describe_task(addresses, index) | own | environment,
                out=out,
                err=err,
                name=str(source),
                number=index,
            )
            self.workers.append(Worker(f"worker {index} ({addresses[index]})", process, out, err))
        return self.workers

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()

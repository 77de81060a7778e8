"""A cluster of worker processes on this machine that lasts for one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from distribax.cluster.ray.ports import find_quiet_ports

_DEVICE_VARIABLES: Final = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "TF_CONFIG")


@dataclass(frozen=True)
class WorkerResult:
    """How a worker process has ended.

    Args:
        worker_id: The index of the worker.
        returncode: Its exit code; None if it had to be killed.
        stdout: What it has written to its standard output.
        stderr: What it has written to its standard error.
    """

    worker_id: int
    returncode: int | None
    stdout: str
    stderr: str


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that no process uses now.

    Args:
        count: How many ports.

    Returns:
        The ports, all different.
    """
    return find_quiet_ports(count)


def run_workers(
    program: str,
    num_workers: int = 2,
    *,
    timeout: float = 120.0,
    start: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[WorkerResult]:
    """Runs a Python program in every worker of a cluster, and waits until all have ended.

    Each process finds its task in TF_CONFIG.

    Args:
        program: The source code of the program; it may be indented.
        num_workers: How many workers the cluster has.
        timeout: After how many seconds processes that still run are killed.
        start: The workers to start, by default all; the others are missing.
        environment: Environment variables for all workers, in addition to those of this process.

    Returns:
        How each of the workers has ended.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    inherited = {k: v for k, v in os.environ.items() if k not in _DEVICE_VARIABLES}
    processes: dict[int, subprocess.Popen[str]] = {}
    try:
        for worker_id in range(num_workers) if start is None else start:
            task = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": worker_id},
            }
            processes[worker_id] = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program)],
                env=inherited | {"TF_CONFIG": json.dumps(task)} | dict(environment or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        deadline = time.monotonic() + timeout
        # All at the same time: a worker whose output is not read blocks, and so do the others.
        with ThreadPoolExecutor(len(processes)) as readers:
            waits = [readers.submit(_wait, i, p, deadline) for i, p in processes.items()]
            return [wait.result() for wait in waits]
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(worker_id: int, process: subprocess.Popen[str], deadline: float) -> WorkerResult:
    try:
        out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        # SIGTERM would only tell JAX to prepare for a preemption.
        process.kill()
        out, err = process.communicate()
        return WorkerResult(worker_id, None, out, err)
    return WorkerResult(worker_id, process.returncode, out, err)

"""A cluster of worker processes on this machine, started for one test and ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_DEVICE_VARIABLES = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "TF_CONFIG")


@dataclass(frozen=True)
class WorkerResult:
    """How a worker process has ended; `returncode` is None if it had to be killed."""

    worker_id: int
    returncode: int | None
    stdout: str
    stderr: str


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def run_workers(
    program: str,
    num_workers: int = 2,
    *,
    timeout: float = 120.0,
    start: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[WorkerResult]:
    """Runs a Python program in every worker of a cluster, and waits for all to end.

    Each process has TF_CONFIG with its task. Those that have not ended after `timeout` seconds are
    killed. `start` names the workers to start, all by default; the others are missing.
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
        # All at once: a worker that waits until its output is read keeps the others waiting too.
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

"""Clusters of workers that run one program, in forks: a hundred times quicker to start."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distribax.testing import WorkerResult, free_ports
from tests.environment import inherited
from tests.forked import ForkedProcess, start_forked


def run_workers(
    program: str,
    num_workers: int = 2,
    *,
    timeout: float | None = None,
    start: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> list[WorkerResult]:
    """Runs a program in every worker of a cluster, and waits for all, as `dx.testing` does.

    Args:
        program: The source code of the program; it may be indented.
        num_workers: How many workers the cluster has.
        timeout: After how many seconds processes that still run are killed, and end with None; by
            default, the test's own timeout is the bound.
        start: The workers to start, by default all; the others are missing.
        environment: Environment variables for all workers, in addition to those of this process.
        host: The address of all workers.

    Returns:
        How each of the workers has ended.
    """
    addresses = [f"{host}:{port}" for port in free_ports(num_workers)]
    processes: dict[int, ForkedProcess] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for index in range(num_workers) if start is None else start:
                processes[index] = start_forked(
                    textwrap.dedent(program),
                    inherited() | describe_task(addresses, index) | dict(environment or {}),
                    out=folder / f"{index}.out",
                    err=folder / f"{index}.err",
                    number=index,
                )
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            return [
                WorkerResult(
                    index,
                    _wait(process, deadline),
                    (folder / f"{index}.out").read_text(),
                    (folder / f"{index}.err").read_text(),
                )
                for index, process in processes.items()
            ]
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def _wait(process: ForkedProcess, deadline: float) -> int | None:
    if math.isinf(deadline):
        return process.wait()
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def describe_task(addresses: list[str], index: int) -> dict[str, str]:
    """Returns the variable that tells a process which worker of which cluster it is."""
    task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps(task)}

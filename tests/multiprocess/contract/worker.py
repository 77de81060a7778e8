"""One worker of the contract: joins the cluster, and runs the tests in step with the others."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import pytest

import distribax as dx
from tests.multiprocess.contract.lock_step import LockStep

ROOT = Path(__file__).parents[3]
VARIABLE = "DISTRIBAX_TEST_CONTRACT"
"""Holds the `Assignment`, as JSON."""


@dataclass(frozen=True)
class Assignment:
    """What the workers are to run, and where they write what happened.

    Attributes:
        devices: How many devices each worker has.
        paths: The files or folders with the tests.
        half: 0 or 1 for half of the cases, None for all.
        only_meetings: Whether to leave out tests in which workers neither meet nor differ.
        test_seconds: How long a test may take.
        wait_seconds: How long a worker waits for the others after a test.
        done: The names of tests to leave out.
        logs: The folder that the workers write to.
    """

    devices: int
    paths: tuple[str, ...]
    half: int | None = None
    only_meetings: bool = False
    test_seconds: float = 300.0
    wait_seconds: float = 120.0
    done: tuple[str, ...] = ()
    logs: str = ""

    def as_text(self) -> str:
        """Returns the assignment as the environment variable holds it."""
        return json.dumps(asdict(self))


def log_of(logs: str, worker_id: int) -> Path:
    """Returns the file that a worker writes to."""
    return Path(logs) / f"worker-{worker_id}.jsonl"


def main() -> None:
    """Runs what the environment variable says, and ends the process."""
    assignment = Assignment(**json.loads(os.environ.pop(VARIABLE)))
    # They are those of the pytest that has started this process.
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.chdir(ROOT)
    dx.set_virtual_cpu_devices(assignment.devices)
    dx.MultiWorkerMirroredStrategy()
    plugin = LockStep(
        log_of(assignment.logs, jax.process_index()),
        frozenset(assignment.done),
        assignment.half,
        assignment.only_meetings,
        assignment.wait_seconds,
    )
    options = [
        f"--rootdir={ROOT}",
        f"--config-file={ROOT / 'pyproject.toml'}",
        "--tb=short",
        "--quiet",
        f"--timeout={assignment.test_seconds}",
        # A test that hangs, hangs in XLA, where a signal does not reach it.
        "--timeout-method=thread",
        *("-p", "no:cacheprovider", "-p", "no:xdist"),
    ]
    sys.exit(pytest.main([*options, *assignment.paths], plugins=[plugin]))

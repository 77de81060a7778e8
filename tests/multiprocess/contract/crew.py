"""Starts workers that run the contract together, and reads what they have written."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field, replace

from distribax.testing import WorkerResult
from tests.multiprocess.contract.worker import VARIABLE, Assignment, log_of
from tests.multiprocess.workers import run_workers

NUM_WORKERS = 2
_MAX_STARTS = 6
_LEAST_SECONDS = 5.0
_LAST_LINES = 40
_LONGEST_TEXT = 2500
_PROGRAM = "from tests.multiprocess.contract.worker import main; main()"
# Those of pytest: all passed, or some failed.
_ORDERLY_ENDS = (0, 1)


@dataclass
class Outcome:
    """How one test has ended in each worker (or "unfinished"), and what it said."""

    by_worker: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether all workers have run the test, or all have skipped it, and none has failed."""
        words = [self.by_worker.get(worker) for worker in range(NUM_WORKERS)]
        return words in ([word] * NUM_WORKERS for word in ("passed", "skipped"))

    def __str__(self) -> str:
        words = [f"worker {worker}: {word}" for worker, word in sorted(self.by_worker.items())]
        texts = [
            f"worker {worker}:\n{text[-_LONGEST_TEXT:]}"
            for worker, text in self.texts.items()
            if text
        ]
        return "\n".join([", ".join(words), *texts])


@dataclass
class Report:
    """The outcomes of all tests by name, and what kept the workers from running them all."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    trouble: str = ""

    @property
    def failures(self) -> dict[str, Outcome]:
        """The tests that did not end well in all workers."""
        return {name: outcome for name, outcome in self.outcomes.items() if not outcome.is_good}

    def names(self, word: str) -> list[str]:
        """Returns the tests that have ended so in all workers."""
        return [
            name
            for name, outcome in self.outcomes.items()
            if outcome.is_good and outcome.by_worker[0] == word
        ]

    def __str__(self) -> str:
        failures = self.failures
        parts = [f"{len(failures)} of {len(self.outcomes)} cases went wrong:", *failures]
        parts += [f"\n== {name}\n{outcome}" for name, outcome in failures.items()]
        return "\n".join([*([self.trouble] if self.trouble else []), *parts])


def run_contract(assignment: Assignment, seconds: float) -> Report:
    """Runs tests in two workers, for at most so many seconds.

    When a test lets the workers fall out of step, they are started again for the tests after it.
    """
    report = Report()
    deadline = time.monotonic() + seconds
    for _ in range(_MAX_STARTS):
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            report.trouble = f"the workers were not ready within {seconds:g} s"
            return report
        before = len(report.outcomes)
        ended, results = _start(replace(assignment, done=tuple(report.outcomes)), report, left)
        orderly = all(result.returncode in _ORDERLY_ENDS for result in results)
        if ended and orderly:
            return report
        if ended or len(report.outcomes) == before:
            report.trouble = f"the workers could not go on:\n{_last_words(results)}"
            return report
    report.trouble = f"the workers were started {_MAX_STARTS} times, and tests are left"
    return report


def _start(
    assignment: Assignment, report: Report, seconds: float
) -> tuple[bool, list[WorkerResult]]:
    """Runs the workers once; returns whether all have come to their end, and how they ended."""
    with tempfile.TemporaryDirectory() as logs:
        results = run_workers(
            _PROGRAM,
            NUM_WORKERS,
            timeout=seconds,
            environment={VARIABLE: replace(assignment, logs=logs).as_text()},
        )
        ends = [_read(report, logs, result) for result in results]
        return all(ends), results


def _read(report: Report, logs: str, result: WorkerResult) -> bool:
    """Adds what a worker has written; returns whether it has come to its end."""
    running, finished = "", False
    log = log_of(logs, result.worker_id)
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        if "started" in entry:
            running = entry["started"]
        elif "ended" in entry:
            running = ""
            outcome = report.outcomes.setdefault(entry["ended"], Outcome())
            outcome.by_worker[result.worker_id] = entry["outcome"]
            outcome.texts[result.worker_id] = entry["text"]
        finished = "finished" in entry
    if running:
        outcome = report.outcomes.setdefault(running, Outcome())
        outcome.by_worker[result.worker_id] = "unfinished"
        outcome.texts[result.worker_id] = _last_words([result])
    return finished


def _last_words(results: list[WorkerResult]) -> str:
    return "\n".join(
        f"worker {result.worker_id} ended with {result.returncode}:\n"
        + "\n".join([*_tail(result.stdout), *_tail(result.stderr)])
        for result in results
    )


def _tail(text: str) -> list[str]:
    return text.splitlines()[-_LAST_LINES:]

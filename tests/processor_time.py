"""A report of the processor time of tests: `pytest -p tests.processor_time`.

It counts the test process and everything below it, and so tells what a run costs, however busy the
machine is. Fixtures of a module or session count for the test that makes or closes them, and so
does the start of a process of pytest-xdist.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_NUM_SLOWEST = 40
_spent: dict[str, float] = defaultdict(float)
_last = 0.0


def measure() -> float:
    """Returns the seconds that this process, its descendants and those that ended have used."""
    total, pids = 0.0, [os.getpid()]
    while pids:
        pid = pids.pop()
        try:
            # After the name, which may hold spaces: utime, stime, cutime and cstime.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        except OSError:
            continue  # It has ended meanwhile.
    return total / _TICKS


def pytest_collection_finish(session: pytest.Session) -> None:
    """Notes what it took to get here; in a process of pytest-xdist, the first test will."""
    global _last
    if not hasattr(session.config, "workerinput"):
        _last = measure()
        _spent["(start and collection)"] = _last


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds to each report of set-up, call or tear-down what it has cost."""
    global _last
    report = yield
    now = measure()
    report.processor_seconds = max(0.0, now - _last)
    _last = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the reports, also those of the processes of pytest-xdist."""
    spent: float = getattr(report, "processor_seconds", 0.0)
    _spent[report.nodeid] += spent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints files and tests, those that cost most first."""
    files: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, seconds in _spent.items():
        file = name.partition("::")[0]
        files[file] += seconds
        counts[file] += 1
    terminalreporter.section("processor time")
    terminalreporter.write_line(f"{sum(files.values()):8.1f} s in all")
    for file in sorted(files, key=files.__getitem__, reverse=True):
        terminalreporter.write_line(f"{files[file]:8.1f} s  {counts[file]:4d}  {file}")
    terminalreporter.write_line("")
    for name in sorted(_spent, key=_spent.__getitem__, reverse=True)[:_NUM_SLOWEST]:
        terminalreporter.write_line(f"{_spent[name]:8.1f} s  {name}")

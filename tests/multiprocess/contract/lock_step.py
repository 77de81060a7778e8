"""A pytest plug-in that keeps the workers of a cluster at the same test.

Each worker writes a line when a test starts and one when it has ended, so that whoever started the
workers knows what happened however they ended. After each test the workers tell each other its
outcome. If the outcomes differ, or a worker does not come, the others cannot go on: one worker may
wait in a collective that another one has left. Then they end, and are started again for the rest.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distribax import jax_private
from tests import turns

OUT_OF_STEP = 70
"""The exit code of a worker that cannot go on with the others."""

_MEETINGS = re.compile(
    r"reduce|gather|psum|broadcast|merge_call|\bSUM\b|\bMEAN\b|ON_READ|aggregation"
    r"|update_state|apply_gradients|minimize|initial|replica_id|replica_number"
)
"""Words for what makes workers meet, or differ.

That is collectives, variables and metrics that combine what replicas write, optimizers, initial
values (the first worker's count), and the number of a replica, which goes on from worker to worker.
"""

_REFUSAL = re.compile(r"pytest\.raises\(")
_RESULT = re.compile(r"\bassert\b|\bclose\(|\bcheck\w*\(")
"""A test with the first and not the second is about an error: no worker comes to the others."""


class LockStep:
    """Writes what happens to `log`, and leaves out the tests in `done`.

    The other arguments are those of `worker.Assignment`.
    """

    def __init__(
        self,
        log: Path,
        done: frozenset[str],
        half: int | None,
        only_meetings: bool,
        wait_seconds: float,
    ) -> None:
        self._log = log
        self._done = done
        self._half = half
        self._only_meetings = only_meetings
        self._wait_seconds = wait_seconds
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Chooses the tests, and checks that all workers have chosen the same."""
        kept = [item for item in items if item.nodeid not in self._done]
        if self._only_meetings:
            late = turns.find_late_arguments(items, lambda item: "")
            kept = [item for item in kept if _is_a_meeting(item) and item not in late]
        if self._half is not None:
            numbers = _numbers_of_functions(items)
            kept = [item for item in kept if _is_in_half(item, numbers, self._half)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        names = "\n".join(item.nodeid for item in items)
        digests = self._tell_all("collected", hashlib.sha256(names.encode()).hexdigest())
        if len(set(digests)) > 1:
            self._leave("the workers have collected different tests")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Runs a test, and waits until the other workers have run it."""
        self._reports = []
        self._write(started=item.nodeid)
        result = yield
        outcome = _outcome(self._reports)
        text = "\n".join(report.longreprtext for report in self._reports if report.longrepr)
        self._write(ended=item.nodeid, outcome=outcome, text=text)
        outcomes = self._tell_all(f"outcome of {item.nodeid}", outcome)
        if len(set(outcomes)) > 1:
            self._leave(f"{item.nodeid}: {outcomes} by worker")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the reports of a test's set-up, call and tear-down."""
        self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        """Notes that the worker has come to its end."""
        self._write(finished=True)

    def _tell_all(self, key: str, text: str) -> list[str]:
        try:
            return jax_private.exchange_text(key, text, self._wait_seconds)
        except RuntimeError as error:
            return self._leave(str(error))

    def _leave(self, why: str) -> Any:
        self._write(left=why)
        sys.stderr.flush()
        # JAX's exit would wait for the other workers.
        os._exit(OUT_OF_STEP)

    def _write(self, **entry: Any) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(entry) + "\n")


def _outcome(reports: list[pytest.TestReport]) -> str:
    outcomes = {report.outcome for report in reports}
    return next(word for word in ("failed", "skipped", "passed") if word in outcomes)


def _numbers_of_functions(items: list[pytest.Item]) -> dict[str, int]:
    """Numbers the test functions, whatever the parameters of their cases."""
    names = dict.fromkeys(_function(item) for item in items)
    return {name: number for number, name in enumerate(names)}


def _is_a_meeting(item: pytest.Item) -> bool:
    """Tells whether a test, or a function of its file that it uses, has one of the words."""
    return _has_meetings(getattr(item, "function"))  # noqa: B009


@functools.cache
def _has_meetings(function: Callable[..., Any]) -> bool:
    module = sys.modules[function.__module__]
    own = inspect.getsource(function)
    if _REFUSAL.search(own) and not _RESULT.search(own):
        return False
    return _MEETINGS.search(_read_source(function, module, set())) is not None


def _read_source(function: Callable[..., Any], module: ModuleType, seen: set[str]) -> str:
    """Returns the text of a function and of those in its file that it names."""
    seen.add(function.__name__)
    text = inspect.getsource(function)
    for name, value in vars(module).items():
        if not inspect.isfunction(value) or value.__module__ != module.__name__ or name in seen:
            continue
        if re.search(rf"\b{name}\b", text):
            text += _read_source(value, module, seen)
    return text


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _is_in_half(item: pytest.Item, numbers: dict[str, int], half: int) -> bool:
    """Tells whether a case is in a half: of each function, one half has eager, the other compiled.

    Functions with no such choice belong to the halves in turn.
    """
    number = numbers[_function(item)]
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "compiled" in callspec.params:
        number += callspec.params["compiled"] == "compiled"
    return number % 2 == half

"""The crew that runs the contract reports what goes wrong, and does not wait for it for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.contract.crew import run_contract
from tests.multiprocess.contract.worker import Assignment

pytestmark = [pytest.mark.multiprocess, pytest.mark.soak, pytest.mark.timeout(300)]

TESTS = """
import os, time
import jax, jax.numpy as jnp, pytest
import distribax as dx

STRATEGY = dx.MultiWorkerMirroredStrategy()
FIRST = jax.process_index() == 0

def total():
    values = STRATEGY.run(lambda: jnp.ones(()))
    return float(STRATEGY.reduce("SUM", values, axis=None))

def test_passes():
    assert total() == 2

def test_fails_in_both():
    assert total() == 3

def test_goes_on():
    assert total() == 2

def test_fails_in_one():
    assert FIRST, "not the first"
    total()

def test_goes_on_after_a_restart():
    assert total() == 2

def test_ends_one():
    if not FIRST:
        os._exit(3)
    total()

def test_hangs_in_one():
    if not FIRST:
        time.sleep(100)
    total()

@pytest.mark.skip("not today")
def test_is_skipped():
    pass

def test_passes_at_the_end():
    assert total() == 2
"""


def test_every_case_has_an_outcome(tmp_path: Path) -> None:
    path = tmp_path / "test_cases.py"
    path.write_text(TESTS)
    assignment = Assignment(1, (str(path),), test_seconds=8, wait_seconds=4)
    report = run_contract(assignment, seconds=200)
    assert report.trouble == ""

    def short(names: list[str]) -> list[str]:
        return [name.rpartition("::")[2] for name in names]

    assert short(report.names("passed")) == [
        "test_passes",
        "test_goes_on",
        "test_goes_on_after_a_restart",
        "test_passes_at_the_end",
    ]
    assert short(report.names("skipped")) == ["test_is_skipped"]
    failures = dict(zip(short(list(report.failures)), report.failures.values(), strict=True))
    assert failures["test_fails_in_both"].by_worker == {0: "failed", 1: "failed"}
    assert failures["test_fails_in_one"].by_worker[1] == "failed"
    assert "not the first" in str(failures["test_fails_in_one"])
    assert failures["test_ends_one"].by_worker[1] == "unfinished"
    assert failures["test_hangs_in_one"].by_worker[1] == "unfinished"
    assert "test_fails_in_one" in str(report)
    assert len(failures) == 4


def test_trouble_before_the_first_test_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test_cases.py"
    path.write_text("import no_such_module")
    report = run_contract(Assignment(1, (str(path),)), seconds=60)
    assert "no_such_module" in report.trouble
    assert "no_such_module" in str(report)

"""The contract of tests/multidevice/contract, kept by the workers of a real cluster.

The same files run in two worker processes with one or two devices each, eager and compiled, in lock
step; a failure here names the cases that went wrong, and what each worker said. `make test` has the
functions in which workers meet or differ (`lock_step.py` says how it knows them), on two devices
each, with two of their arguments, and each either eager or compiled, in turn: in the others a
worker does what one process does. `make contract` has all functions, both shapes and both modes.
"""

from __future__ import annotations

import pytest

from tests.multiprocess.contract.crew import Report, run_contract
from tests.multiprocess.contract.worker import ROOT, Assignment

CONTRACT = ROOT / "tests" / "multidevice" / "contract"
SHAPES = {"2x1": 1, "2x2": 2}
"""The devices of each worker, by the shape of the cluster: workers times devices."""

# Files with tests that are all about one process: its devices, its mesh, its threads.
APART = {"test_cross_device_ops.py", "test_devices.py", "test_set_mesh.py", "test_threads.py"}
# Half of the tests in it are about replicas of one process that wait for each other.
_OFTEN_SKIPPED = {"test_failures.py"}
FILES = sorted(path.name for path in CONTRACT.glob("test_*.py") if path.name not in APART)

# Their metrics are those of another file: that they are Keras's is the same in a worker.
_OFTEN_ENOUGH = {"test_keras_metrics.py"}

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1600)]


def _check(report: Report, at_least: int, most_skipped: float = 0.1) -> None:
    if report.failures or report.trouble:
        pytest.fail(str(report), pytrace=False)
    passed, skipped = len(report.names("passed")), len(report.names("skipped"))
    assert passed >= at_least
    assert skipped <= most_skipped * passed + 1, report.names("skipped")


# Takes half a minute: hundreds of cases, each of which two workers trace and compile.
def test_half_of_the_contract() -> None:
    paths = tuple(str(CONTRACT / name) for name in FILES if name not in _OFTEN_ENOUGH)
    assignment = Assignment(SHAPES["2x2"], paths, half=1, only_meetings=True)
    report = run_contract(assignment, seconds=1500)
    _check(report, at_least=100)


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("file", FILES)
def test_the_contract(file: str, shape: str) -> None:
    report = run_contract(Assignment(SHAPES[shape], (str(CONTRACT / file),)), seconds=1500)
    _check(report, at_least=5, most_skipped=1.0 if file in _OFTEN_SKIPPED else 0.1)

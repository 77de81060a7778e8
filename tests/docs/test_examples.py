"""The scripts in examples/ run, each in a process of its own, with quick settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.multiprocess


def _script(name: str, *arguments: str) -> str:
    """Returns a program that runs an example as its command line would."""
    return (
        "import runpy, sys\n"
        f"sys.argv = {[name, *arguments]!r}\n"
        f"runpy.run_path({str(_EXAMPLES / name)!r}, run_name='__main__')\n"
    )


def test_mirrored_digits(run_fresh: Callable[..., str]) -> None:
    lines = run_fresh(_script("mirrored_digits.py", "--devices", "2", "--epochs", "4"))
    *epochs, last = lines.splitlines()
    losses = [float(line.split()[-1]) for line in epochs]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]
    found = re.fullmatch(r"accuracy (0\.\d+) on 2 devices", last)
    assert found is not None and float(found[1]) > 0.8


def test_keras_fit(run_fresh: Callable[..., str]) -> None:
    lines = run_fresh(_script("keras_fit.py", "--devices", "2", "--epochs", "3")).splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("epoch")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    found = re.fullmatch(r"accuracy (\d\.\d+) on 2 devices", lines[-1])
    assert found is not None and float(found[1]) > 0.7


def test_input_pipeline(run_fresh: Callable[..., str]) -> None:
    lines = run_fresh(_script("input_pipeline.py", "--records", "300")).splitlines()
    assert lines[:3] == [
        "2 replicas have seen 128 records",
        "3 replicas have seen the other 172",
        "each record once: True",
    ]
    # The records are written one after the other from one stream of random numbers.
    expected = np.random.default_rng(0).normal(size=8 * 300).astype(np.float32).sum()
    assert float(lines[3].split()[-1]) == pytest.approx(expected, abs=1e-2)


def test_multi_worker(run_fresh: Callable[..., str]) -> None:
    arguments = ["run", "--workers", "2", "--devices-per-worker", "2"]
    arguments += [str(_EXAMPLES / "multi_worker.py"), "--epochs", "6"]
    launch = f"from distribax.cli import main\nassert main({arguments!r}) == 0\n"
    lines = run_fresh(launch).splitlines()
    epochs = [line.split() for line in lines if line.startswith("[worker 0] epoch")]
    assert len(epochs) == 6 and float(epochs[-1][-1]) > 0.85
    for worker in range(2):
        done = f"[worker {worker}] worker {worker} of 2 is done: 4 replicas"
        assert done in lines


def test_parameter_server(run_fresh: Callable[..., str]) -> None:
    lines = run_fresh(_script("parameter_server.py", "--steps", "450")).splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("epoch")]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]
    found = re.fullmatch(r"right on unseen pairs: (\d+\.\d)%", lines[-1])
    assert found is not None and float(found[1]) > 75


def test_every_example_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in _EXAMPLES.glob("*.py")} <= tested

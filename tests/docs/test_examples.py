"""The scripts in examples/ run, with quick settings, on two devices.

That two devices compute what one computes is the contract's, and that of the tests of Keras and
NNX; `make contract` checks it with the examples, too.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  sets environment variables, which a test must not

import distribax as dx
from tests.process_forks import WITH_WORKERS

_EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.multiprocess


def _load(name: str) -> ModuleType:
    """Imports an example without running it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", _EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look for their module there.
    spec.loader.exec_module(module)
    return module


def _train(name: str, size: int, strategy: dx.Strategy | None = None) -> list[float]:
    """Trains on some strategy, by default two devices, and returns the losses."""
    made = strategy or dx.MirroredStrategy(["CPU:0", "CPU:1"])
    losses: list[float] = _load(name).train(made, size)
    gc.collect()  # Iterators that are left in the middle end their threads when they are gone.
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("image_classifier_nnx", 2),
        ("image_classifier_linen", 2),
        ("image_classifier_equinox", 2),
        ("gpt", 2),
        ("text_classifier", 60),
        ("lora", 60),
        ("gan", 5),
        ("gradient_accumulation", 20),
        ("uneven_evaluation", 257),
        ("keras_custom_loop", 2),
    ],
)
def test_two_devices_compute_what_one_computes(name: str, size: int) -> None:
    two, one = _train(name, size), _train(name, size, dx.OneDeviceStrategy("CPU:0"))
    np.testing.assert_allclose(two, one, rtol=2e-3, atol=2e-4)


def test_image_classifier_nnx() -> None:
    assert len(_train("image_classifier_nnx", 2)) == 2


def test_image_classifier_linen() -> None:
    assert len(_train("image_classifier_linen", 2)) == 2


def test_image_classifier_equinox() -> None:
    assert len(_train("image_classifier_equinox", 2)) == 2


def test_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_train("gpt", 2)) == 2
    assert len(capsys.readouterr().out) >= 60


def test_text_classifier() -> None:
    losses = _train("text_classifier", 60)
    assert losses[-1] < 0.5 * losses[0]


def test_lora(capsys: pytest.CaptureFixture[str]) -> None:
    losses = _train("lora", 60)
    assert np.mean(losses[-5:]) < 0.9 * losses[0]
    assert "frozen weights unchanged: True; 928 of 5536" in capsys.readouterr().out


def test_gan() -> None:
    assert len(_train("gan", 5)) == 5


def test_gradient_accumulation() -> None:
    in_parts = _train("gradient_accumulation", 20)
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    at_once = _load("gradient_accumulation").train(strategy, 20, accumulate=False)
    np.testing.assert_allclose(in_parts, at_once, atol=1e-4)


def test_uneven_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    # The last batch has one example: one of the replicas gets none.
    loss, accuracy, _ = _train("uneven_evaluation", 257)
    assert loss > 0 and 0.6 < accuracy < 0.9
    assert "257 examples, 2 compiled steps" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["dx", "python", "grain", "torch", "tf.data"])
def test_other_input(source: str) -> None:
    example = _load("other_input")
    if source in ("torch", "tf.data"):
        pytest.importorskip({"torch": "torch", "tf.data": "tensorflow"}[source])
    sums = example.add_up(dx.MirroredStrategy(["CPU:0", "CPU:1"]), example.SOURCES[source]())
    assert sums == [276.0, 852.0, 642.0]


def test_preemption(run_forked: Callable[..., str], tmp_path: Path) -> None:
    """A run that was told to stop and was started again ends as one that was not."""

    def run(folder: str, *arguments: str) -> list[str]:
        options = ["--steps", "12", "--directory", str(tmp_path / folder), *arguments]
        program = _script("preemption.py", *options)
        caught = "try:\n" + "".join(f"    {line}\n" for line in program.splitlines())
        return run_forked(f"{caught}except SystemExit as end:\n    print(end.code)\n").splitlines()

    assert run("stopped", "--stop-at", "5") == ["begins at step 0", "42"]
    begin, weights = run("stopped")
    assert begin in ("begins at step 5", "begins at step 6")
    assert run("straight") == ["begins at step 0", weights]


def test_actors(run_forked: Callable[..., str]) -> None:
    lines = run_forked(_script("actors.py", "--updates", "25")).splitlines()
    found = re.fullmatch(r"reward (0\.\d+) at first, (0\.\d+) at the end", lines[-2])
    assert found is not None and float(found[2]) > 1.3 * float(found[1])


def test_first_tour() -> None:
    """The cells of the notebook run in order, as in a kernel."""
    notebook = json.loads((_EXAMPLES / "first_tour.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "notebook"}
    sources = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(sources) >= 6 and not any(c.get("outputs") for c in notebook["cells"])
    for index, source in enumerate(sources):
        exec(compile(source, f"cell {index}", "exec"), names)
    assert names["train_step"].trace_count == 1
    names.clear()
    gc.collect()


def _script(name: str, *arguments: str) -> str:
    """Returns a program that runs an example as its command line would."""
    return (
        "import runpy, sys\n"
        f"sys.argv = {[name, *arguments]!r}\n"
        f"runpy.run_path({str(_EXAMPLES / name)!r}, run_name='__main__')\n"
    )


def test_mirrored_digits(run_forked: Callable[..., str]) -> None:
    script = _script("mirrored_digits.py", "--devices", "2", "--epochs", "4")
    *epochs, last = run_forked(script).splitlines()
    losses = [float(line.split()[-1]) for line in epochs]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]
    found = re.fullmatch(r"accuracy (0\.\d+) on 2 devices", last)
    assert found is not None and float(found[1]) > 0.8


def test_keras_fit(run_forked: Callable[..., str]) -> None:
    lines = run_forked(_script("keras_fit.py", "--devices", "2", "--epochs", "3")).splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("epoch")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    found = re.fullmatch(r"accuracy (\d\.\d+) on 2 devices", lines[-1])
    assert found is not None and float(found[1]) > 0.7


def test_input_pipeline(run_forked: Callable[..., str]) -> None:
    lines = run_forked(_script("input_pipeline.py", "--records", "300")).splitlines()
    assert lines[:3] == [
        "2 replicas have seen 128 records",
        "3 replicas have seen the other 172",
        "each record once: True",
    ]
    # The records are written one after the other from one stream of random numbers.
    expected = np.random.default_rng(0).normal(size=8 * 300).astype(np.float32).sum()
    assert float(lines[3].split()[-1]) == pytest.approx(expected, abs=1e-2)


def test_multi_worker(run_forked: Callable[..., str]) -> None:
    arguments = ["run", "--workers", "2", "--devices-per-worker", "2"]
    arguments += [str(_EXAMPLES / "multi_worker.py"), "--epochs", "6"]
    launch = f"from distribax.cli import main\nassert main({arguments!r}) == 0\n"
    lines = run_forked(launch, **WITH_WORKERS).splitlines()
    epochs = [line.split() for line in lines if line.startswith("[worker 0] epoch")]
    assert len(epochs) == 6 and float(epochs[-1][-1]) > 0.85
    for worker in range(2):
        done = f"[worker {worker}] worker {worker} of 2 is done: 4 replicas"
        assert done in lines


def test_parameter_server(run_forked: Callable[..., str]) -> None:
    lines = run_forked(_script("parameter_server.py", "--ps", "1", "--steps", "450")).splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("epoch")]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]
    found = re.fullmatch(r"right on unseen pairs: (\d+\.\d)%", lines[-1])
    assert found is not None and float(found[1]) > 75


def test_keras_custom_loop(capsys: pytest.CaptureFixture[str]) -> None:
    losses = _train("keras_custom_loop", 2)
    assert losses[1] < 0.9 * losses[0]
    assert "restored: True" in capsys.readouterr().out


def test_keras_transformer() -> None:
    losses = _load("keras_transformer").train(dx.MirroredStrategy(["CPU:0", "CPU:1"]), 2)
    assert losses[1] < losses[0]


# Takes more than 10 s: the program, a worker and two servers start, and Keras is imported twice.
def test_keras_parameter_server(run_forked: Callable[..., str]) -> None:
    options = ["--workers", "1", "--steps", "150", "--epochs", "2"]
    script = _script("keras_parameter_server.py", *options)
    lines = run_forked(script).splitlines()
    losses = [float(re.findall(r"loss (\S+),", line)[0]) for line in lines if "epoch" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    found = re.fullmatch(r"right on unseen pairs: (\d+\.\d)%", lines[-1])
    assert found is not None and float(found[1]) > 55


def test_every_example_has_a_test_and_is_in_the_gallery() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    gallery = (_EXAMPLES.parent / "docs" / "examples.md").read_text()
    for path in sorted(_EXAMPLES.glob("*.*")):
        assert path.stem in tested
        assert f"`{path.name}`" in gallery
        assert path.suffix == ".ipynb" or len(path.read_text().splitlines()) < 150


@pytest.mark.parametrize("path", sorted(_EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_say_what_they_are(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring is not None and path.name in docstring

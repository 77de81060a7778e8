"""`distribax demo`: every strategy learns the digits, and says what is missing."""

from __future__ import annotations

import importlib.util
import io
import os
import re

import pytest
from rich.console import Console

from distribax.cli import main
from distribax.cli.demo import demo_programs
from distribax.cli.demo.view import DemoResult, DemoView, EpochFigures, draw_bars
from tests.forked import start_forked
from tests.process_forks import WITH_WORKERS


def run_demo(*arguments: str) -> str:
    """Returns what the demo prints in a process of its own."""
    command = ["demo", "--epochs", "3", "--devices", "2", *arguments]
    program = f"import sys\nfrom distribax.cli import main\nsys.exit(main({command!r}))"
    process = start_forked(program, os.environ | {"KERAS_BACKEND": "jax"} | WITH_WORKERS)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("strategy", "fact"),
    [
        ("mirrored", "mirrored on 2 devices"),
        ("central", "on CPU:0"),
        ("multi-worker", "2, each with a part of every batch"),
        ("ps", "a coordinator, 2 workers and 1 parameter server"),
        ("keras", "3."),
    ],
)
def test_each_strategy_learns_the_digits(strategy: str, fact: str) -> None:
    shown = run_demo("--strategy", strategy)
    assert re.search(r"epoch 3/3: loss [\d.]+, accuracy [\d.]+%, [\d,]+ examples/s", shown)
    found = re.search(r"accuracy on unseen digits │ ([\d.]+)%", shown)
    assert found is not None and float(found[1]) > 60, shown
    assert fact in shown and "Read on: docs/guide/" in shown


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--strategy", "ps"), "pip install 'distribax[ray]'"),
        (("--keras",), "pip install 'distribax[keras]'"),
    ],
)
def test_missing_packages_are_named(
    option: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", *option]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.multiprocess
def test_keras_must_use_jax() -> None:
    program = "import sys\nfrom distribax.cli import main\nsys.exit(main(['demo', '--keras']))"
    process = start_forked(program, os.environ | {"KERAS_BACKEND": "numpy"})
    _, err = process.communicate()
    assert process.returncode == 1
    assert "Keras uses numpy: set KERAS_BACKEND=jax" in err


def test_workers_that_fail_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_programs, "_WORKER_MODULE", "this")
    assert main(["demo", "--strategy", "multi-worker"]) == 1
    assert "the workers have reported nothing" in capsys.readouterr().err


def test_numbers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--epochs", "none"])
    assert "'none' is not a whole number of at least 1" in capsys.readouterr().err


def test_terminal_has_a_live_view() -> None:
    stream = io.StringIO()
    view = DemoView(Console(file=stream, force_terminal=True, width=100), "digits")
    with view.show():
        for epoch in (1, 2):
            figures = EpochFigures(epoch, 2, 1.0 / epoch, 0.5 * epoch, 1000.0)
            view.tell(EpochFigures.from_line(figures.to_line()))
    view.report(DemoResult(0.9, {"devices": "CPU:0"}), ["docs/guide/x.md"])
    shown = stream.getvalue()
    assert "compiling the first step" in shown and "epoch 2 of 2" in shown
    assert "█▁" in shown and "90.0%" in shown and "docs/guide/x.md" in shown
    assert draw_bars([1.0, 1.0]) == "▁▁"

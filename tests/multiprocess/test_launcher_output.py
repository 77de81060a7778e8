"""`distribax run -m`, and where the output of the workers goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked import start_forked
from tests.multiprocess.launchers import finish, lines_of

pytestmark = pytest.mark.multiprocess

TRAIN = """
import os, sys
from my_package.names import NAME
print(NAME, os.environ["RANK"], sys.argv[1:], __name__, __package__)
GLOO = "1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
print(f"[Gloo] Rank {GLOO}\\n[Gloo] Rank [Gloo] Rank {GLOO}\\n{GLOO}")
print("W1118 02:52:16.865349    1636 preemption_notifier.cc:90] SIGTERM caught", file=sys.stderr)
if "fail" in sys.argv:
    raise KeyError("no such feature")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a package."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("NAME = 'hello'")
    (package / "train.py").write_text(TRAIN)
    return tmp_path


def run_in(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs the launcher in a folder; returns its exit code and what it has written."""
    command = ["run", "--workers", "2", *arguments]
    program = (
        f"import os, sys\nos.chdir({str(folder)!r})\n"
        f"from distribax.cli import main\nsys.exit(main({command!r}))"
    )
    return finish(start_forked(program, os.environ))


def test_module_runs_as_with_python_m_and_each_worker_has_a_log(folder: Path) -> None:
    said = "['x', '-m'] __main__ my_package"
    code, out, err = run_in(folder, "--log-dir", "logs", "-m", "my_package.train", "x", "-m")
    assert (code, out) == (0, ""), err
    for worker in range(2):
        log = folder / "logs" / f"worker_{worker}.log"
        assert log.read_text() == f"hello {worker} {said}\n"
    # The next start continues the files, and --tee shows the lines as well.
    code, out, err = run_in(
        folder, "--log-dir", "logs", "--tee", "-m", "my_package.train", "x", "-m"
    )
    assert code == 0, err
    assert lines_of(out, 0) == [f"hello 0 {said}"]
    assert (folder / "logs" / "worker_0.log").read_text() == f"hello 0 {said}\n" * 2


def test_error_of_a_module_is_shown_although_the_output_is_in_a_file(folder: Path) -> None:
    code, out, err = run_in(folder, "--log-dir", "logs", "-m", "my_package.train", "fail")
    assert (code, out) == (1, "")
    assert "KeyError: 'no such feature'" in err and "my_package/train.py" in err
    assert "runpy" not in err and "worker_main" not in err
    assert "KeyError" in "".join(log.read_text() for log in (folder / "logs").iterdir())

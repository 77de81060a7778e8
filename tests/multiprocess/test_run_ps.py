"""`distribax run --ps`: one script, a coordinator with its workers and servers."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distribax.cli import main
from tests.multiprocess.marked_programs import MarkedPrograms, marked_programs

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import json, os, sys, time
from distribax.cluster.ray import engine

class Actor:
    def ask(self):
        return os.getpid()

e = engine.from_resolver(engine.detect_resolver(), 90)
import ray
options = [e.make_worker_options(i) for i in range(e.num_workers)]
actors = [ray.remote(Actor).options(**each).remote() for each in options]
pids = ray.get([actor.ask.remote() for actor in actors], timeout=300)
open(sys.argv[1], "w").write("ready")
while True:
    time.sleep(0.1)
    try:
        if ray.get(actors[0].ask.remote(), timeout=300) != pids[0]:
            break
    except ray.exceptions.RayActorError:
        pass
print(json.dumps({"role": json.loads(os.environ["TF_CONFIG"])["task"], "servers": e.num_servers,
                  "kept": ray.get(actors[1].ask.remote(), timeout=300) == pids[1]}))
if "fail" in sys.argv:
    raise ValueError("the script has failed")
"""


@pytest.fixture
def programs() -> Iterator[MarkedPrograms]:
    with marked_programs() as programs:
        yield programs


def _task_of(pid: int) -> str:
    """Returns the task that the launcher has given a process in TF_CONFIG."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (config,) = [v.decode() for v in variables if v.startswith(b"TF_CONFIG=")]
    return config.partition('"task": ')[2]


# Takes more than 10 s: five nodes of Ray, one of them after the death of another.
def test_a_worker_that_dies_is_started_again_and_a_script_that_fails_ends_all(
    programs: MarkedPrograms, tmp_path: Path
) -> None:
    script, ready = tmp_path / "train.py", tmp_path / "ready"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher = programs.start_command(
        ["-m", "distribax", "run", "--workers", "2", "--ps", "1", str(script), str(ready), "fail"]
    )
    while not ready.exists():
        assert launcher.process.poll() is None, launcher.finish()
        time.sleep(0.1)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 4
    (worker,) = [int(pid) for pid in children if '"worker", "index": 0' in _task_of(int(pid))]
    os.kill(worker, signal.SIGKILL)
    code, out, err = launcher.finish()
    assert code == 1
    assert '[chief] {"role": {"type": "chief", "index": 0}, "servers": 1, "kept": true}' in out
    assert "distribax run: worker 0 failed (SIGKILL); it is started again" in err
    assert "distribax run: chief failed (exit code 1)" in err
    assert "ValueError: the script has failed" in err
    assert programs.left() == []


def test_a_script_without_a_strategy(programs: MarkedPrograms, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('done')")
    launcher = programs.start_command(["-m", "distribax", "run", "--ps", "1", str(script)])
    assert launcher.finish() == (0, "[chief] done\n", "")
    assert programs.left() == []


def test_a_server_that_cannot_start_is_given_up(programs: MarkedPrograms, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(100)")
    command = ["-m", "distribax", "run", "--ps", "1", str(script)]
    # It fails before it imports anything: it is started four times, and so is the worker.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('server_main' in argument for argument in sys.orig_argv):\n"
        "    sys.stderr.write('no Ray here\\n')\n"
        "    sys.stderr.flush()\n"
        "    os._exit(1)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = programs.start_command(command, PYTHONPATH=path)
    code, _, err = launcher.finish()
    assert code == 1
    assert "failed (exit code 1); it is started again" in err
    assert "no Ray here" in err
    assert programs.left() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ps", "-1"], "--ps=-1: expected a whole number of at least 0"),
        (
            ["--ps", "1", "--nnodes", "2", "--rdzv-endpoint", "h:1"],
            "--ps=1 starts a cluster on this machine alone, but --nnodes=2",
        ),
    ],
)
def test_options(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", *options, str(script)]) == 2
    assert message in capsys.readouterr().err

"""`distribax run` with real processes: what workers are given, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distribax.cli import main
from distribax.testing.local_cluster import free_ports
from tests.multiprocess.launchers import Start, finish, is_gone, launchers, lines_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with launchers(tmp_path) as start:
        yield start


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


TELL = """
import json, os, sys
names = ["TF_CONFIG", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "DISTRIBAX_RESTART_COUNT", "RANK",
         "LOCAL_RANK", "WORLD_SIZE", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "MASTER_ADDR"]
print(json.dumps({k: os.environ.get(k) for k in names} | {"argv": sys.argv[1:],
      "name": __name__, "main": sys.modules["__main__"].__file__, "path": sys.path[0]}))
"""


def test_workers_get_the_cluster_their_devices_and_the_arguments(
    start: Start, tmp_path: Path
) -> None:
    launcher = start(
        TELL,
        *("--workers", "2", "--devices-per-worker", "3"),
        arguments=("--workers", "9", "x"),
        XLA_FLAGS="--xla_force_host_platform_device_count=5 --xla_cpu_enable_fast_math=false",
        TF_CONFIG="left from another program",
    )
    code, out, err = finish(launcher)
    assert code == 0, err
    clusters: list[Any] = []
    for worker in range(2):
        (line,) = lines_of(out, worker)
        told = json.loads(line)
        config = json.loads(told["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": worker}
        clusters.append(config["cluster"])
        assert told["JAX_NUM_CPU_DEVICES"] == "3"
        assert told["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
        assert told["DISTRIBAX_RESTART_COUNT"] == "0"
        assert told["RANK"] == told["LOCAL_RANK"] == told["JAX_PROCESS_ID"] == str(worker)
        assert told["WORLD_SIZE"] == told["JAX_NUM_PROCESSES"] == "2"
        assert told["argv"] == ["--workers", "9", "x"]
        assert told["name"] == "__main__"
        assert told["main"] == str(tmp_path / "train.py")
        assert told["path"] == str(tmp_path)
    assert clusters[0] == clusters[1]
    addresses = clusters[0]["worker"]
    assert len(set(addresses)) == 2
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_output_is_handed_on_line_by_line(start: Start) -> None:
    code, out, err = finish(
        start(
            r"""
            import sys
            sys.stdout.write("one\r\ntwo\rthree\n\n")
            sys.stdout.buffer.write(b"\xff\n" + b"x" * 70000)
            sys.stderr.write("to stderr")
            """
        )
    )
    assert code == 0
    assert lines_of(out, 0) == ["one", "two", "three", "", "\ufffd", "x" * 70000]
    assert "[worker 0] to stderr\n" in err


FAILS = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    # Like a JAX program, this one takes no notice of SIGTERM; and it has a child of its own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(os.getpid(), child.pid)
    time.sleep(100)
"""


def test_first_failure_is_what_the_user_sees_and_the_others_end(start: Start) -> None:
    launcher = start(
        f"""{FAILS}
import atexit
# Like JAX's exit, which waits for the other workers.
atexit.register(time.sleep, 100)

def train():
    raise KeyError("no such feature")

print("worker 1 starts", file=sys.stderr)
time.sleep(1)
train()
""",
        *("--workers", "2", "--grace-seconds", "0.5"),
    )
    code, out, err = finish(launcher)
    assert code == 1
    summary = err.partition("distribax run: ")[2]
    assert summary.startswith("worker 1 failed (exit code 1); its error output ended with:\n")
    assert summary.splitlines()[1] == "    Traceback (most recent call last):"
    assert "in train" in summary
    assert summary.endswith("    KeyError: 'no such feature'\n")
    assert "worker_main" not in err
    for pid in map(int, lines_of(out, 0)[0].split()):
        assert is_gone(pid)


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "worker 1 failed (exit code 3) and wrote nothing"),
        ("sys.exit('no data')", 1, "    no data\n"),
        ("os._exit(4)", 4, "worker 1 failed (exit code 4)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker 1 failed (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", 165, "worker 1 failed (signal 37)"),
        ("raise KeyboardInterrupt", 130, "    KeyboardInterrupt\n"),
        ("exec('1 +')", 1, "SyntaxError"),
    ],
)
def test_exit_code_is_the_first_failures(start: Start, end: str, code: int, words: str) -> None:
    launcher = start(f"{FAILS}\n{end}\n", "--workers", "2", "--grace-seconds", "0.1")
    returned, _, err = finish(launcher)
    assert returned == code
    assert words in err


MEET = """
import os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(__file__).parent
# The launcher stands still while the workers fail, so that it sees all of it at once.
(folder / f"ready-{rank}").touch()
deadline = time.monotonic() + 300
while not (folder / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # Its exception comes before the others'.
        (
            ("time.sleep(0.5); raise ValueError", "raise KeyError", "time.sleep(0.3); sys.exit(9)"),
            1,
        ),
        # What happens to one worker becomes an exception in another, and JAX aborts a third.
        (("raise ValueError", "os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"), 2),
        (("os.abort()", "raise ValueError", "time.sleep(0.3); os._exit(4)"), 2),
    ],
)
def test_cause_is_told_from_its_consequences(
    start: Start, tmp_path: Path, ends: tuple[str, ...], first: int
) -> None:
    branches = "".join(f"if rank == {i}:\n    {end}\n" for i, end in enumerate(ends))
    launcher = start(MEET + branches, "--workers", "3", "--grace-seconds", "0.1")
    try:
        wait_until(lambda: all((tmp_path / f"ready-{i}").exists() for i in range(3)))
        launcher.send_signal(signal.SIGSTOP)
        workers = children_of(launcher.pid)
        (tmp_path / "go").touch()
        assert len(workers) == 3 and all(is_gone(pid) for pid in workers)
    finally:
        launcher.send_signal(signal.SIGCONT)
    _, _, err = finish(launcher)
    *_, summary = [line for line in err.splitlines() if line.startswith("distribax run: worker")]
    assert summary.startswith(f"distribax run: worker {first} failed (")
    assert err.count("distribax run: at the same time: ") == 1


CUT_OFF = """
import os, socket, stat, time
if os.environ["RANK"] == "0":
    for number in map(int, os.listdir("/proc/self/fd")):
        if os.path.exists(f"/proc/self/fd/{number}") and stat.S_ISSOCK(os.fstat(number).st_mode):
            socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_WR)
    time.sleep(1.0)
    os._exit(4)
time.sleep(0.5)
raise ValueError("a consequence")
"""


def test_a_worker_that_is_about_to_be_gone_is_waited_for(start: Start) -> None:
    """Others fail when the connections of a process close, before the system tells of its end."""
    launcher = start(CUT_OFF, "--workers", "2", "--grace-seconds", "0.1")
    code, _, err = finish(launcher)
    assert code == 4
    assert "distribax run: worker 0 failed (exit code 4)" in err
    assert "distribax run: at the same time: worker 1 failed (exit code 1)" in err


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "pass"])
def test_success_of_all_is_success(start: Start, end: str) -> None:
    code, _, err = finish(start(f"import sys\n{end}\n", "--workers", "2"))
    assert code == 0
    assert "distribax run" not in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stopped_launcher_ends_its_workers_and_nobody_else(
    start: Start, number: signal.Signals, code: int
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        # A restart must not follow.
        launcher = start(FAILS, "--grace-seconds", "0.5", "--max-restarts", "3")
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()[2:]]
        assert len(pids) == 2
        launcher.send_signal(number)
        returned, _, err = finish(launcher)
        assert returned == code
        assert f"stopped by {number.name}; the workers have ended" in err
        assert all(is_gone(pid) for pid in pids)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_second_ctrl_c_does_not_wait(start: Start) -> None:
    launcher = start(FAILS, "--grace-seconds", "1000")
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()[2:]]
    launcher.send_signal(signal.SIGINT)
    # Two of the same signal would be one if the first has not been seen yet.
    launcher.send_signal(signal.SIGTERM)
    assert finish(launcher)[0] in (130, 143)
    assert all(is_gone(pid) for pid in pids)


def test_killed_launcher_leaves_no_worker(start: Start) -> None:
    launcher = start(FAILS)
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()[2:]]
    launcher.kill()
    launcher.wait()
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)


def test_child_that_outlives_its_worker_is_ended(start: Start) -> None:
    # It holds the worker's output open; the launcher must not wait for it.
    code, out, _ = finish(
        start(
            """
            import subprocess, sys
            print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid)
            """
        )
    )
    assert code == 0
    assert is_gone(int(lines_of(out, 0)[0]))


def test_two_machines_are_one_cluster(start: Start) -> None:
    (port,) = free_ports(1)
    script = """
        import os
        import numpy as np
        import distribax as dx

        assert "TF_CONFIG" not in os.environ
        strategy = dx.MultiWorkerMirroredStrategy()
        number = strategy.run(lambda: np.float32(int(os.environ["RANK"])))
        print(strategy.num_replicas_in_sync, strategy.reduce("SUM", number, axis=None))
    """
    endpoint = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    nodes = [
        start(script, *endpoint, "--node-rank", str(rank), TF_CONFIG="of something else")
        for rank in (1, 0)
    ]
    for rank, node in zip((1, 0), nodes, strict=True):
        code, out, err = finish(node)
        assert code == 0, err
        assert lines_of(out, rank)[-1] == "2 1.0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["missing.py"], "the script 'missing.py' does not exist"),
        (["."], "the script '.' is a folder"),
        (["--workers", "0", __file__], "--workers=0: expected a whole number of at least 1"),
        (["--devices-per-worker", "0", __file__], "--devices-per-worker=0"),
        (["--max-restarts", "-1", __file__], "--max-restarts=-1: expected"),
        (["--nnodes", "0", __file__], "--nnodes=0"),
        (["--nnodes", "2", "--node-rank", "2", __file__], "from 0 to 1"),
        (["--nnodes", "2", __file__], "needs --rdzv-endpoint=host:port"),
        (["--rdzv-endpoint", "host0", __file__], "the port is missing"),
        (["--rdzv-endpoint", "host0:x", __file__], "--rdzv-endpoint='host0:x'"),
        (["--grace-seconds", "nan", __file__], "--grace-seconds=nan"),
    ],
    ids=lambda value: " ".join(value[:-1]) if isinstance(value, list) else None,
)
def test_mistakes_are_told_before_anything_starts(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("distribax run: error: ") and words in error

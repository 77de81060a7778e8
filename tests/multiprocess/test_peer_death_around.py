"""Workers that are lost while they connect, that end, and what the launcher makes of it."""

from __future__ import annotations

import pickle
import signal
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import distribax as dx
from distribax.types import PEER_LOST_EXIT_CODE
from tests.environment import inherited
from tests.forked import start_forked
from tests.multiprocess.crew import TRAINING, Cluster
from tests.multiprocess.launchers import finish
from tests.process_forks import WITH_WORKERS

pytestmark = pytest.mark.multiprocess

# The first worker has JAX's service: it is the one that is missed most.
either = pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])


@pytest.mark.parametrize(
    ("place", "code", "victim"),
    [
        ("session.connect_processes", 1, 0),
        ("multi_worker.resolve_devices", PEER_LOST_EXIT_CODE, 1),
        pytest.param("session.connect_processes", 1, 1, marks=pytest.mark.thorough),
        pytest.param(
            "multi_worker.resolve_devices", PEER_LOST_EXIT_CODE, 0, marks=pytest.mark.thorough
        ),
    ],
)
def test_worker_that_dies_while_they_connect_is_named(
    cluster: Cluster, tmp_path: Path, place: str, code: int, victim: int
) -> None:
    module, _, name = place.rpartition(".")
    before = f"""
        import json, os, pathlib, signal, time
        import distribax as dx
        from distribax.cluster.peers import session
        from distribax.strategies import multi_worker

        connected = pathlib.Path("{tmp_path}", "connected")

        def die(*args):
            while {code} == {PEER_LOST_EXIT_CODE} and not connected.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == {victim}:
            {module}.{name} = die
        else:
            resolve_devices = multi_worker.resolve_devices
            multi_worker.resolve_devices = lambda *args: [
                connected.touch(),
                resolve_devices(*args),
            ][1]
    """
    workers = cluster.start("", before=before)
    workers[1 - victim].must_name(workers[victim], "died", code=code)


def test_worker_that_dies_while_another_one_has_just_connected(cluster: Cluster) -> None:
    """JAX has connected it, and would end it with the service that connects them."""
    before = """
        import json, os, signal, time
        import distribax as dx
        from distribax.cluster.peers import session
        from distribax.strategies import multi_worker

        class Session(session.Session):
            def _on_loss(self, loss):
                late.append(loss)
                super()._on_loss(loss)

        late = []
        connect = session.connect_processes

        def connect_slowly(*args):
            connect(*args)
            while not late:
                time.sleep(0.01)

        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            multi_worker.resolve_devices = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        else:
            from distribax.cluster.peers import membership
            session._LOOK_SECONDS = 60.0
            session.connect_processes = connect_slowly
            membership.Session = Session
    """
    workers = cluster.start("", before=before)
    workers[0].must_name(workers[1], "died", code=PEER_LOST_EXIT_CODE)


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ("time.sleep(60)", "did not connect within 5 s, although all workers have joined"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_processes_that_cannot_connect(cluster: Cluster, instead: str, message: str) -> None:
    before = f"""
        import time
        import distribax as dx
        from distribax.cluster.peers import session

        session.connect_processes = lambda *args: {instead}
        init = dx.MultiWorkerMirroredStrategy.__init__
        dx.MultiWorkerMirroredStrategy.__init__ = lambda self: init(self, join_timeout_seconds=5)
    """
    workers = cluster.start("", before=before)
    assert [worker.wait() for worker in workers] == [1, 1]
    # One of them may have been told of the other's error first.
    assert any(message in worker.err for worker in workers)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_workers_end_when_they_like(cluster: Cluster, first: int) -> None:
    """Longer apart than a worker may be silent, and than one waits for the other at its end."""
    workers = cluster.start(
        f"""
        train(20)
        if worker != {first}:
            time.sleep(8)
            # Nothing of this needs the other worker.
            print(w.numpy()[:2].tolist(), float(jnp.ones(3).sum()))
        """,
        DISTRIBAX_PEER_TIMEOUT="4",
    )
    assert [worker.wait() for worker in workers] == [0, 0], [worker.err for worker in workers]
    assert "[20.0, 20.0] 3.0" in workers[1 - first].out
    assert [worker.err for worker in workers] == ["", ""]


@either
def test_worker_that_has_ended_is_named_when_it_is_needed(cluster: Cluster, victim: int) -> None:
    workers = cluster.start(f"train(20 if worker == {victim} else 40)", COMPILED="True")
    workers[1 - victim].must_name(workers[victim], "has ended")
    assert workers[victim].wait() == 0, workers[victim].err


# With the launcher.

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Gives a function that runs a program in two workers and waits for the launcher's end."""

    def run(
        program: str, *more: str, variables: Mapping[str, str] = WITH_WORKERS
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "train.py"
        path.write_text(TRAINING + textwrap.dedent(program))
        options = ["--workers", "2", "--grace-seconds", "3", *more]
        command = ["run", *options, str(path)]
        launcher = start_forked(
            f"import sys\nfrom distribax.cli import main\nsys.exit(main({command!r}))",
            inherited() | {"DISTRIBAX_PEER_TIMEOUT": "4", "COMPILED": "True"} | variables,
        )
        code, out, err = finish(launcher)
        return subprocess.CompletedProcess(command, code, out, err)

    return run


def test_launcher_shows_which_worker_was_killed(launch: Launch) -> None:
    done = launch("train(20)\nif worker == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain()")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "worker 1 failed (SIGKILL)" in done.stderr


def test_launcher_ends_a_worker_that_is_stopped(launch: Launch) -> None:
    done = launch(
        """
        print("pid", os.getpid(), flush=True)
        train(20)
        if worker == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        train()
        """,
        variables={},
    )
    assert done.returncode == PEER_LOST_EXIT_CODE, done.stderr
    assert "worker 0 failed (exit code 43: it has lost another worker)" in done.stderr
    assert "PeerLostError: worker 1 (127.0.0.1:" in done.stderr
    assert "stopped answering" in done.stderr
    pids = [int(line.split()[-1]) for line in done.stdout.splitlines() if " pid " in line]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_launcher_starts_all_again_when_one_was_lost(launch: Launch) -> None:
    done = launch(
        """
        train(20)
        if worker == 1 and os.environ["DISTRIBAX_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        train(20)
        print("trained", w.numpy()[0])
        """,
        "--max-restarts",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert "starting all workers again (restart 1 of 1)" in done.stderr
    assert done.stdout.count("trained 40.0") == 2


def test_launcher_shows_the_error_that_came_first(launch: Launch) -> None:
    done = launch("train(20)\nif worker == 1: raise ValueError('the cause')\ntrain()")
    assert done.returncode == 1, done.stderr
    assert "worker 1 failed (exit code 1)" in done.stderr
    assert done.stderr.strip().endswith("ValueError: the cause")


# Settings.


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["join_timeout_seconds", "peer_timeout_seconds"])
def test_timeout_must_be_positive(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*a positive number"):
        dx.MultiWorkerMirroredStrategy(**{name: seconds})


@pytest.mark.parametrize("text", ["soon", "", "0", "inf"])
@pytest.mark.parametrize("name", ["DISTRIBAX_JOIN_TIMEOUT", "DISTRIBAX_PEER_TIMEOUT"])
def test_timeout_in_the_environment_must_be_a_number(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}': expected a number of"):
        dx.MultiWorkerMirroredStrategy()


def test_error_survives_pickling() -> None:
    error = dx.PeerLostError("worker 1 (a:1)", "died", 5.0)
    again = pickle.loads(pickle.dumps(error))
    assert (again.peer, again.reason, again.since) == (error.peer, error.reason, 5.0)
    assert str(again) == str(error)

"""Workers that die, stop or fail: what the others see of it, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.crew import Cluster

pytestmark = pytest.mark.multiprocess

# Each worker, and each mode; a mode changes nothing in what a worker of that number does.
compiled_or_eager = pytest.mark.parametrize(
    ("compiled", "victim"),
    [
        pytest.param(True, 0, id="compiled-0"),
        pytest.param(False, 1, id="eager-1"),
        pytest.param(True, 1, id="compiled-1", marks=pytest.mark.thorough),
        pytest.param(False, 0, id="eager-0", marks=pytest.mark.thorough),
    ],
)
# The first worker has JAX's service: without it, the others have the least time.
either = pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])


@compiled_or_eager
def test_killed_worker_is_named(cluster: Cluster, compiled: bool, victim: int) -> None:
    workers = cluster.start("train()", COMPILED=str(compiled))
    workers[victim].wait_until_says("ready")
    workers[1 - victim].wait_until_says("ready")
    workers[victim].process.kill()
    workers[1 - victim].must_name(workers[victim], "died")
    assert "Missing since " in workers[1 - victim].err
    assert ("train.py" in workers[1 - victim].err) and ("step" in workers[1 - victim].err)


@compiled_or_eager
def test_stopped_worker_is_named_and_learns_it(
    cluster: Cluster, compiled: bool, victim: int
) -> None:
    workers = cluster.start("train()", COMPILED=str(compiled), DISTRIBAX_PEER_TIMEOUT="4")
    for worker in workers:
        worker.wait_until_says("ready")
    workers[victim].process.send_signal(signal.SIGSTOP)
    workers[1 - victim].must_name(workers[victim], "stopped answering", "for 4 s")
    workers[victim].process.send_signal(signal.SIGCONT)
    workers[victim].must_name(workers[victim], "is this worker itself")


def test_all_of_three_workers_hear_of_an_error(cluster: Cluster) -> None:
    workers = cluster.start(
        """
        train(20)
        if worker == 1:
            raise ValueError("no more\\nof this")
        train()
        """,
        3,
        COMPILED="True",
    )
    for index in (0, 2):
        workers[index].must_name(workers[1], "left with an error: ValueError: no more of this")
    assert workers[1].wait() == 1
    assert workers[1].err.strip().endswith("ValueError: no more\nof this")


def test_error_of_the_first_worker_is_told(cluster: Cluster) -> None:
    workers = cluster.start(
        """
        train(20)
        if worker == 0:
            raise KeyError("gone")
        train()
        """
    )
    workers[1].must_name(workers[0], "left with an error: KeyError: 'gone'")
    assert workers[0].wait() == 1


def test_whatever_a_worker_waits_in_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Also a value that the user holds, input that the workers agree on, and a checkpoint."""
    workers = cluster.start(
        f"""
        def batches(context):
            return dx.data.Dataset.range(10**6).batch(2)

        batch = iter(strategy.distribute_datasets_from_function(batches))
        next(batch)
        checkpoint = dx.Checkpoint(w=w)
        train(20)
        if worker == 0:
            jax.block_until_ready([step(), step()])
        elif worker == 1:
            for _ in range(1000): next(batch)
        elif worker == 2:
            checkpoint.save({str(tmp_path / "checkpoint")!r})
        else:
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        4,
    )
    lines = ("jax.block_until_ready([step(), step()])", "next(batch)", "checkpoint.save(")
    for worker, line in zip(workers[:3], lines, strict=True):
        worker.must_name(workers[3], "died")
        assert line in worker.err or "return strategy.reduce(" in worker.err


def test_program_that_catches_all_errors_is_ended(cluster: Cluster) -> None:
    workers = cluster.start(
        """
        train(20)
        if worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            try:
                train()
            except Exception as error:
                print("caught", type(error), flush=True)
        """,
        COMPILED="True",
    )
    workers[0].must_name(workers[1], "died")


def test_small_program_that_waits_in_the_calling_thread_is_ended(cluster: Cluster) -> None:
    """JAX runs the smallest programs in the thread that calls them."""
    workers = cluster.start("train()", COMPILED="True", DISTRIBAX_PEER_TIMEOUT="3", SIZE="3")
    for worker in workers:
        worker.wait_until_says("ready")
    workers[1].process.send_signal(signal.SIGSTOP)
    workers[0].must_name(workers[1], "stopped answering")


@either
def test_callbacks_run_before_the_end(cluster: Cluster, victim: int) -> None:
    """Longer than XLA would let a process live when the first worker is gone."""
    workers = cluster.start(
        """
        @dx.on_peer_lost
        def first(error):
            raise KeyError("of the callback")

        @dx.on_peer_lost
        def second(error):
            time.sleep(2)
            sys.stdout.write(f"called back: {type(error).__name__} {error.peer}")

        train()
        """
    )
    for worker in workers:
        worker.wait_until_says("ready")
    workers[victim].process.kill()
    workers[1 - victim].must_name(workers[victim], "died")
    assert "KeyError: 'of the callback'" in workers[1 - victim].err
    assert f"called back: PeerLostError {workers[victim].name}" in workers[1 - victim].out


def test_network_failure_is_not_blamed_on_a_worker(cluster: Cluster) -> None:
    workers = cluster.start(
        """
        train(20)
        if worker == 0:
            raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset")
        train()
        """,
        DISTRIBAX_PEER_TIMEOUT="2",
    )
    assert workers[0].wait() == 1
    assert "Do they make different calls, or is there a network problem?" in workers[0].err
    assert f"{workers[1].name} has waited" in workers[0].err
    workers[1].must_name(workers[0], "left with an error", "Gloo all-reduce failed")


def test_forked_process_is_not_the_worker(cluster: Cluster) -> None:
    """It may end, and run on, as it likes."""
    workers = cluster.start(
        """
        import warnings
        warnings.simplefilter("ignore")  # JAX advises against forks.
        train(20)
        if worker == 1:
            if os.fork() == 0:
                sys.exit(0)
            if os.fork() == 0:
                raise ValueError("of the child")
            child = os.fork()
            if child == 0:
                time.sleep(120)
                os._exit(0)
            print("child", child, flush=True)
            for _ in range(2):
                os.wait()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        train()
        """
    )
    try:
        workers[0].must_name(workers[1], "died")
    finally:
        for line in workers[1].out.splitlines():
            if line.startswith("child"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[1]), signal.SIGKILL)

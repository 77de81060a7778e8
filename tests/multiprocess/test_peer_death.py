"""Workers that die, stop or fail: what the others see of it, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.crew import Cluster

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

compiled_or_eager = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
either = pytest.mark.parametrize("victim", [0, 1])


@either
@compiled_or_eager
def test_killed_worker_is_named(cluster: Cluster, compiled: bool, victim: int) -> None:
    workers = cluster.start("train()", COMPILED=str(compiled))
    workers[victim].wait_until_says("ready")
    workers[1 - victim].wait_until_says("ready")
    workers[victim].process.kill()
    workers[1 - victim].must_name(workers[victim], "died")


@either
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
    # It wakes up in the middle of a collective, in Gloo, which may not notice.
    workers[victim].must_name(workers[victim], "is this worker itself", codes=(1, 43))


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


def test_every_call_that_needs_the_other_worker_says_so(cluster: Cluster, tmp_path: Path) -> None:
    """Also values that the user holds, input that the workers agree on, and checkpoints."""
    workers = cluster.start(
        f"""
        def batches(context):
            return dx.data.Dataset.range(10**6).batch(2)

        pending = strategy.run(lambda: jnp.ones(()))
        batch = iter(strategy.distribute_datasets_from_function(batches))
        next(batch)
        checkpoint = dx.Checkpoint(w=w)
        train(20)
        if worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)

        def pull():
            for _ in range(1000):
                next(batch)

        calls = dict(
            run=lambda: strategy.run(lambda: w.assign_add(jnp.ones(size))),
            compiled=dx.function(step),
            reduce=lambda: strategy.reduce("SUM", pending, axis=None),
            gather=lambda: strategy.gather(
                strategy.run(lambda: jnp.ones((1,))), axis=0),
            wait=lambda: jax.block_until_ready([step(), step()]),
            next=pull,
            save=lambda: checkpoint.save({str(tmp_path / "checkpoint")!r}),
        )
        for name, call in calls.items():
            try:
                call()
                print(name, "went well")
            except dx.PeerLostError as error:
                assert error.peer.startswith("worker 1 (127.0.0.1:"), error
                print(name, "lost", error.reason[:4])
            except Exception as error:
                print(name, type(error), error)
        """
    )
    assert workers[0].wait() == 0, workers[0].err
    told = [line for line in workers[0].out.splitlines() if not line.startswith("[Gloo]")]
    names = ("run", "compiled", "reduce", "gather", "wait", "next", "save")
    assert told == ["ready", *(f"{name} lost died" for name in names)], workers[0].err


NOTHING_IS_CUT = """
from distribax.cluster import transport
transport.cut = lambda endpoints: 0
train()
"""


def test_wait_that_would_never_end_is_given_up(cluster: Cluster) -> None:
    """As in the middle of a transfer, which Gloo does not give up."""
    workers = cluster.start(NOTHING_IS_CUT, COMPILED="True", DISTRIBAX_PEER_TIMEOUT="3")
    for worker in workers:
        worker.wait_until_says("ready")
    workers[1].process.send_signal(signal.SIGSTOP)
    workers[0].must_name(workers[1], "stopped answering")


def test_call_that_cannot_be_interrupted_ends_the_process(cluster: Cluster) -> None:
    """JAX runs the smallest programs in the thread that calls them."""
    workers = cluster.start(NOTHING_IS_CUT, COMPILED="True", DISTRIBAX_PEER_TIMEOUT="3", SIZE="3")
    for worker in workers:
        worker.wait_until_says("ready")
    workers[1].process.send_signal(signal.SIGSTOP)
    workers[0].must_name(workers[1], "stopped answering", codes=(43,))
    assert "with exit code 43" in workers[0].err
    assert "in train" in workers[0].err


def test_network_failure_is_not_blamed_on_a_worker(cluster: Cluster) -> None:
    workers = cluster.start(
        """
        from distribax.cluster import bootstrap, transport
        train(20)
        if worker == 0:
            transport.cut(bootstrap._joined[0][1].session._watch.endpoints)
        train()
        """,
        DISTRIBAX_PEER_TIMEOUT="2",
    )
    assert [worker.wait() for worker in workers] == [1, 1]
    assert any("all workers still answer" in worker.err for worker in workers)


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

"""Workers that wait for each other in different places: after a while all say where they are."""

from __future__ import annotations

import pytest

from distribax.types import COLLECTIVE_ERROR_EXIT_CODE
from tests.multiprocess.crew import Cluster

pytestmark = pytest.mark.multiprocess

compiled_or_eager = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])


@compiled_or_eager
def test_a_worker_that_reads_a_metric_alone_is_told_where_the_other_is(
    cluster: Cluster, compiled: bool
) -> None:
    workers = cluster.start(
        """
        with strategy.scope():
            seen = dx.metrics.Sum()
        train(20)
        if worker == 0:
            print(w.numpy().sum(), flush=True)  # what is the same everywhere needs nobody else
            print("sum", seen.result(), flush=True)
        else:
            while True:
                time.sleep(0.1)  # busy with something else
        """,
        COMPILED=str(compiled),
        DISTRIBAX_COLLECTIVE_TIMEOUT="4",
    )
    for worker in workers:
        assert worker.wait() == COLLECTIVE_ERROR_EXIT_CODE, worker.err
        assert "CollectiveTimeoutError: the workers have waited for each other" in worker.err
        first, second = (
            next(line for line in worker.err.splitlines() if line.strip().startswith(each.name))
            for each in workers
        )
        assert "has waited for" in first and "train.py" in first
        assert " is at File" in second and "train.py" in second
        assert "its last common call was" in second
    assert "81920.0" in workers[0].out


@compiled_or_eager
def test_workers_in_different_calls_are_told_apart(cluster: Cluster, compiled: bool) -> None:
    """One reads a metric, the others take the next step: what they exchange is nonsense."""
    workers = cluster.start(
        """
        with strategy.scope():
            seen = dx.metrics.Sum()
        train(20)
        if worker == 0:
            print(seen.result(), flush=True)
        train()
        """,
        3,
        COMPILED=str(compiled),
        SIZE="1",
        DISTRIBAX_COLLECTIVE_TIMEOUT="10",
    )
    codes = [worker.wait() for worker in workers]
    assert all(codes), [worker.err for worker in workers]
    told = "".join(worker.err for worker in workers)
    # Depending on what meets what, they go on, wait, or get an error of the transport.
    assert (
        "have made different common calls" in told
        or "in different places" in told
        or "Do they make different calls" in told
    ), told
    assert "sum/total" in told


def test_a_worker_that_is_only_late_is_waited_for(cluster: Cluster) -> None:
    workers = cluster.start(
        """
        options = dx.CommunicationOptions(timeout_seconds=100.0)
        dx.MultiWorkerMirroredStrategy(communication_options=options)
        train(20)
        if worker == 1:
            time.sleep(8)
        train(20)
        print("done", flush=True)
        """,
        COMPILED="True",
        DISTRIBAX_COLLECTIVE_TIMEOUT="3",
    )
    for worker in workers:
        assert worker.wait() == 0, worker.err
        assert "done" in worker.out


def test_workers_that_agree_on_values_for_long_are_not_taken_apart(cluster: Cluster) -> None:
    """A step that is called first makes other common calls: the first worker's values are sent."""
    workers = cluster.start(
        """
        import keras
        from distribax import jax_private

        send = jax_private.broadcast_from_first

        def send_slowly(value):
            # As with hundreds of variables on a busy machine; one worker is ahead of the other.
            time.sleep(0.5 + worker)
            return send(value)

        jax_private.broadcast_from_first = send_slowly
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,)), *layers])
        step = dx.function(lambda x: strategy.run(lambda x: model(x).sum(), args=(x,)))
        step(jnp.ones((1, 2)))
        print("done", flush=True)
        """,
        SIZE="1",
    )
    for worker in workers:
        assert worker.wait() == 0, worker.err
        assert "done" in worker.out

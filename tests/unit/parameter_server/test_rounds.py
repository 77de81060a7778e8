"""Synchronous updates: a round's contributions are averaged and applied once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import optax
import pytest

from distribax.parameter_server import (
    Apply,
    Array,
    OptimizerSpec,
    ParameterClient,
    ParameterServerError,
    ParameterSpec,
    SparseGradient,
)
from distribax.parameter_server.server import presence, request_handler
from tests.unit.parameter_server.conftest import TIMEOUT, Cluster

TABLE = ParameterSpec("t", "table", (8, 2), "float32", 0)
OTHER = ParameterSpec("o", "other", (), "float32", 0)
COUNTER = ParameterSpec("n", "iterations", (), "int32", 0)
ONES = np.ones((8, 2), np.float32)


def _prepare(
    client: ParameterClient,
    rounds: int = 2,
    timeout: float | None = None,
    transformation: Any = None,
) -> None:
    client.create(TABLE, 0 * ONES)
    client.create(OTHER, np.float32(0))
    client.create(COUNTER, np.int32(0))
    pickled = cloudpickle.dumps(transformation or optax.sgd(1.0))
    spec = OptimizerSpec("sgd", pickled, ("t",), (), "n", rounds, timeout)
    client.register_optimizer(0, spec)


class _Pull(threading.Thread):
    """Pulls in another thread, as a worker of its own would."""

    def __init__(self, client: ParameterClient, specs: Sequence[ParameterSpec] = (TABLE, COUNTER)):
        super().__init__()
        self._client = client
        self._specs = specs
        self._values: list[Array] = []
        self.start()

    def run(self) -> None:
        self._values = self._client.pull(self._specs)

    @property
    def waits(self) -> bool:
        self.join(0.3)
        return self.is_alive()

    def result(self) -> list[Array]:
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self._values


def test_contributions_that_come_again_bring_what_is_in_them_then(cluster: Cluster) -> None:
    """What is collected must not change when a client writes its next push to the same memory."""
    large = ParameterSpec("large", "large", (200, 200), "float32", 0)
    clients = [cluster.client("one", worker=0), cluster.client("other", worker=1)]
    reader = cluster.client("reader")
    clients[0].create(large, np.zeros(large.shape, np.float32))
    spec = OptimizerSpec("sgd", cloudpickle.dumps(optax.sgd(1.0)), ("large",), (), None, 4)
    clients[0].register_optimizer(0, spec)
    total = 0
    for number in range(1, 17):
        gradient = np.full(large.shape, -4 * number, np.float32)
        client = clients[number % 2]
        client.push({0: [Apply("sgd", (gradient,))]})
        client.flush()
        total += number
        if number % 4 == 0:
            assert np.all(reader.pull([large])[0] == total)


def test_the_mean_of_a_round_is_applied_once(any_cluster: Cluster) -> None:
    one, other = any_cluster.client("one"), any_cluster.client("other")
    _prepare(one)
    for _ in range(3):
        one.push({0: [Apply("sgd", (ONES,))]})
        other.push({0: [Apply("sgd", (3 * ONES,))]})
        other.flush()
    table, count = one.pull([TABLE, COUNTER])
    assert np.all(table == -6) and count == 3
    assert any_cluster.servers[0].status()["rounds"]["sgd"]["applied"] == 3


def test_a_pull_waits_for_the_round_it_has_contributed_to(
    any_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_handler, "_WAIT_SECONDS", 0.001)  # It has to ask several times.
    one, other = any_cluster.client("one", worker=0), any_cluster.client("other", worker=1)
    _prepare(one)
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    assert any_cluster.servers[0].status()["rounds"]["sgd"]["contributed"] == [one.client_id]
    pull = _Pull(one)
    # Who has not contributed does not wait.
    assert np.all(other.pull([TABLE])[0] == 0)
    assert pull.waits
    other.push({0: [Apply("sgd", (ONES,))]})
    table, count = pull.result()
    assert np.all(table == -1) and count == 1


def test_other_parameters_are_not_waited_for(cluster: Cluster) -> None:
    client = cluster.client(worker=0)
    _prepare(client)
    client.push({0: [Apply("sgd", (ONES,))]})
    assert client.pull([OTHER]) == [0]


def test_a_client_that_is_no_worker_never_waits(cluster: Cluster) -> None:
    client = cluster.client()
    _prepare(client)
    client.push({0: [Apply("sgd", (ONES,))]})
    assert np.all(client.pull([TABLE])[0] == 0)


def test_a_round_is_applied_as_it_is_if_that_was_asked_for(cluster: Cluster) -> None:
    one, other = cluster.client("one", worker=0), cluster.client("other", worker=1)
    _prepare(one, timeout=0.2)
    for client in (one, other, one):
        client.push({0: [Apply("sgd", (ONES,))]})
        client.flush()
    assert np.all(one.pull([TABLE])[0] == -2)
    status = cluster.servers[0].status()["rounds"]["sgd"]
    assert status["incomplete"] == 1 and status["late"] == {other.client_id: 1}


def test_rounds_can_be_completed_at_once(cluster: Cluster) -> None:
    one, coordinator = cluster.client("one", worker=0), cluster.client("coordinator")
    _prepare(one, rounds=3)
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    pull = _Pull(one)
    assert pull.waits
    coordinator.complete_rounds()
    assert np.all(pull.result()[0] == -1)
    assert cluster.servers[0].status()["rounds"]["sgd"]["contributed"] == []


def test_the_share_of_an_idle_worker_is_done_by_another(cluster: Cluster) -> None:
    one, other = cluster.client("one", worker=0), cluster.client("other", worker=1)
    coordinator = cluster.client("coordinator")
    _prepare(one)
    one.pull([TABLE])
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    assert coordinator.watch_rounds([])[0]["waiting"] == []
    pull = _Pull(one)
    assert pull.waits
    (waiting,) = coordinator.watch_rounds([1])
    assert (waiting["contributions"], waiting["num_shares"], waiting["missing"]) == (1, 2, [1])
    assert waiting["waiting"] == [0] and waiting["seconds"] > 0
    # With the parameters of the same round.
    assert np.all(pull.result()[0] == 0)
    assert coordinator.watch_rounds([])[0]["missing"] == [0]
    # The one that was idle comes too late for this round.
    late = _Pull(other)
    assert late.waits
    one.push({0: [Apply("sgd", (3 * ONES,))]})
    assert np.all(late.result()[0] == -2)
    assert coordinator.watch_rounds([]) == []


def test_the_share_of_a_lost_worker_is_done_by_another(
    any_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, lost = any_cluster.client("one", worker=0), any_cluster.client("lost", worker=1)
    _prepare(one)
    lost.pull([TABLE])
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    pull = _Pull(one)
    assert pull.waits
    monkeypatch.setattr(presence, "ABSENCE_SECONDS", 0.1)
    assert pull.waits
    lost.close()
    assert np.all(pull.result()[0] == 0)
    one.push({0: [Apply("sgd", (3 * ONES,))]})
    assert np.all(one.pull([TABLE])[0] == -2)


def test_what_a_worker_had_begun_is_free_when_it_is_started_again(cluster: Cluster) -> None:
    one, lost = cluster.client("one", worker=0), cluster.client("lost", worker=1)
    _prepare(one)
    lost.pull([TABLE])
    again = cluster.client("again", worker=1)
    again.pull([TABLE])
    one.push({0: [Apply("sgd", (ONES,))]})
    again.push({0: [Apply("sgd", (3 * ONES,))]})
    again.flush()
    assert np.all(one.pull([TABLE])[0] == -2)


def test_a_worker_that_comes_back_too_late_is_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "ABSENCE_SECONDS", 0.0)
    one, away = cluster.client("one", worker=0), cluster.client("away", worker=1)
    _prepare(one)
    away.pull([TABLE])
    away._connections[0]._disconnect()
    one.push({0: [Apply("sgd", (ONES,))]})
    assert np.all(one.pull([TABLE])[0] == 0)
    away.push({0: [Apply("sgd", (ONES,))]})
    with pytest.raises(ParameterServerError, match=r"worker 1 had no connection .* too late"):
        away.flush()
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    away.push({0: [Apply("sgd", (ONES,))]})
    away.flush()
    assert np.all(one.pull([TABLE])[0] == -1)


def test_what_is_begun_and_not_contributed_is_returned(cluster: Cluster) -> None:
    one, other = cluster.client("one", worker=0), cluster.client("other", worker=1)
    coordinator = cluster.client("coordinator")
    _prepare(one)
    other.pull([TABLE])
    one.push({0: [Apply("sgd", (ONES,))]})
    pull = _Pull(one)
    coordinator.watch_rounds([1])
    assert pull.waits  # It seems to be idle, but it computes.
    other.return_shares()
    assert np.all(pull.result()[0] == 0)


def test_workers_that_contribute_to_different_rounds_do_not_block_each_other(
    cluster: Cluster,
) -> None:
    one, other = cluster.client("one", worker=0), cluster.client("other", worker=1)
    _prepare(one)
    one.register_optimizer(
        0, OptimizerSpec("second", cloudpickle.dumps(optax.sgd(1.0)), ("o",), (), None, 2)
    )
    both = [TABLE, OTHER]
    one.pull(both)
    other.pull(both)
    one.push({0: [Apply("sgd", (ONES,))]})
    other.push({0: [Apply("second", (np.float32(1),))]})
    pulls = [_Pull(one, both), _Pull(other, both)]
    # One of them does the share of the other, which waits as it does.
    pulls[0].result() if not pulls[0].waits else pulls[1].result()
    first, last = (one, other) if not pulls[0].is_alive() else (other, one)
    first.push({0: [Apply("sgd", (ONES,)), Apply("second", (np.float32(1),))]})
    first.flush()
    for pull in pulls:
        pull.result()
    coordinator = cluster.client("coordinator")
    assert last is not first and coordinator.watch_rounds([]) == []
    table, single = coordinator.pull(both)
    assert np.all(table == -1) and single == -1


def test_more_gradients_than_an_update_takes_are_refused(cluster: Cluster) -> None:
    one, other = cluster.client("one", worker=0), cluster.client("other", worker=1)
    _prepare(one)
    other.pull([TABLE])
    one.push({0: [Apply("sgd", (ONES,))] * 2})
    with pytest.raises(ParameterServerError, match=r"only 1 of its 2 shares are left"):
        one.flush()
    other.return_shares()
    one.push({0: [Apply("sgd", (ONES,))] * 3})
    with pytest.raises(ParameterServerError, match=r"more than the 2 gradients"):
        one.flush()
    assert np.all(one.pull([TABLE])[0] == 0)


def test_sparse_dense_and_missing_gradients_are_averaged(cluster: Cluster) -> None:
    client = cluster.client()
    _prepare(client, rounds=4)
    rows = SparseGradient([1, 1], 4 * ONES[:2])
    client.push({0: [Apply("sgd", (gradient,)) for gradient in (4 * ONES, rows, None, None)]})
    (table,) = client.pull([TABLE])
    assert np.all(table[0] == -1) and np.all(table[1] == -3)
    client.push({0: [Apply("sgd", (rows,))] * 4})
    assert np.all(client.pull([TABLE])[0][1] == -3 - 8)
    client.push({0: [Apply("sgd", (None,))] * 4})
    table, count = client.pull([TABLE, COUNTER])
    assert np.all(table[1] == -11) and count == 3


def test_contributions_are_kept_in_snapshots(cluster: Cluster, tmp_path: Any) -> None:
    cluster.start(snapshot_dir=tmp_path)
    client = cluster.client()
    _prepare(client)
    client.push({0: [Apply("sgd", (SparseGradient([2], ONES[:1]),), {"unused": 1.0})]})
    client.flush()
    cluster.servers[0].snapshot()
    cluster.restart(snapshot_dir=tmp_path)
    client.push({0: [Apply("sgd", (ONES,))]})
    (table,) = client.pull([TABLE])
    assert np.all(table[0] == -0.5) and np.all(table[2] == -1)


def _failing() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any) -> Any:
        raise ArithmeticError("this one never works")

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def test_a_round_that_cannot_be_applied_does_not_block(cluster: Cluster) -> None:
    one, other = cluster.client("one", worker=0), cluster.client("other", worker=1)
    _prepare(one, transformation=_failing())
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    other.push({0: [Apply("sgd", (ONES,))]})
    with pytest.raises(ParameterServerError, match="never works"):
        other.flush()
    with pytest.raises(ParameterServerError, match="never works"):
        other.complete_rounds()
    assert np.all(one.pull([TABLE])[0] == 0)


def test_a_client_that_waits_can_be_closed(cluster: Cluster) -> None:
    client = cluster.client(worker=0)
    _prepare(client)
    client.push({0: [Apply("sgd", (ONES,))]})
    client.flush()
    errors: list[str] = []

    def pull() -> None:
        try:
            client.pull([TABLE])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=pull)
    thread.start()
    client.close()
    thread.join(TIMEOUT)
    (error,) = errors
    assert error.startswith("This parameter client is closed")

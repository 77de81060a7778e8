"""Synchronous updates: a round's contributions are averaged and applied once."""

from __future__ import annotations

import threading
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
    Rows,
)
from distribax.parameter_server.server import request_handler
from tests.unit.parameter_server.conftest import TIMEOUT, Cluster

TABLE = ParameterSpec("t", "table", (8, 2), "float32", 0)
OTHER = ParameterSpec("o", "other", (), "float32", 0)
COUNTER = ParameterSpec("n", "iterations", (), "int32", 0)
ONES = np.ones((8, 2), np.float32)
LONG = 1000.0


def _prepare(
    client: ParameterClient, rounds: int = 2, timeout: float = LONG, transformation: Any = None
) -> None:
    client.create(TABLE, 0 * ONES)
    client.create(OTHER, np.float32(0))
    client.create(COUNTER, np.int32(0))
    pickled = cloudpickle.dumps(transformation or optax.sgd(1.0))
    spec = OptimizerSpec("sgd", pickled, ("t",), (), "n", rounds, timeout)
    client.register_optimizer(0, spec)


class _Pull(threading.Thread):
    """Pulls in another thread, as a worker of its own would."""

    def __init__(self, client: ParameterClient) -> None:
        super().__init__()
        self._client = client
        self._values: list[Array] = []
        self.start()

    def run(self) -> None:
        self._values = self._client.pull([TABLE, COUNTER])

    def result(self) -> list[Array]:
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self._values


def test_contributions_that_come_again_bring_what_is_in_them_then(cluster: Cluster) -> None:
    """What is collected must not change when a client writes its next push to the same memory."""
    large = ParameterSpec("large", "large", (200, 200), "float32", 0)
    clients = [cluster.client("one"), cluster.client("other")]
    clients[0].create(large, np.zeros(large.shape, np.float32))
    spec = OptimizerSpec("sgd", cloudpickle.dumps(optax.sgd(1.0)), ("large",), (), None, 4, LONG)
    clients[0].register_optimizer(0, spec)
    total = 0
    for number in range(1, 17):
        gradient = np.full(large.shape, -4 * number, np.float32)
        client = clients[number % 2]
        client.push({0: [Apply("sgd", (gradient,))]})
        client.flush()
        total += number
        if number % 4 == 0:
            assert np.all(clients[0].pull([large])[0] == total)


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
    one, other = any_cluster.client("one"), any_cluster.client("other")
    _prepare(one)
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    assert any_cluster.servers[0].status()["rounds"]["sgd"]["waiting"] == [one.client_id]
    pull = _Pull(one)
    # Who has not contributed does not wait.
    assert np.all(other.pull([TABLE])[0] == 0)
    other.push({0: [Apply("sgd", (ONES,))]})
    table, count = pull.result()
    assert np.all(table == -1) and count == 1


def test_other_parameters_are_not_waited_for(cluster: Cluster) -> None:
    client = cluster.client()
    _prepare(client)
    client.push({0: [Apply("sgd", (ONES,))]})
    assert client.pull([OTHER]) == [0]


def test_a_round_that_waits_too_long_is_applied_as_it_is(cluster: Cluster) -> None:
    one, other = cluster.client("one"), cluster.client("other")
    _prepare(one, timeout=0.2)
    for client in (one, other, one):
        client.push({0: [Apply("sgd", (ONES,))]})
        client.flush()
    assert np.all(one.pull([TABLE])[0] == -2)
    status = cluster.servers[0].status()["rounds"]["sgd"]
    assert status["incomplete"] == 1 and status["late"] == {other.client_id: 1}


def test_rounds_can_be_completed_at_once(cluster: Cluster) -> None:
    one, coordinator = cluster.client("one"), cluster.client("coordinator")
    _prepare(one, rounds=3)
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    pull = _Pull(one)
    coordinator.complete_rounds()
    assert np.all(pull.result()[0] == -1)
    assert cluster.servers[0].status()["rounds"]["sgd"]["waiting"] == []


def test_sparse_dense_and_missing_gradients_are_averaged(cluster: Cluster) -> None:
    client = cluster.client()
    _prepare(client, rounds=4)
    rows = Rows([1, 1], 4 * ONES[:2])
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
    client.push({0: [Apply("sgd", (Rows([2], ONES[:1]),), {"unused": 1.0})]})
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
    one, other = cluster.client("one"), cluster.client("other")
    _prepare(one, transformation=_failing())
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    other.push({0: [Apply("sgd", (ONES,))]})
    with pytest.raises(ParameterServerError, match="never works"):
        other.flush()
    with pytest.raises(ParameterServerError, match="never works"):
        other.complete_rounds()
    assert np.all(one.pull([TABLE])[0] == 0)


def test_a_deleted_optimizer_is_not_waited_for(cluster: Cluster) -> None:
    one, other = cluster.client("one"), cluster.client("other")
    _prepare(one)
    one.push({0: [Apply("sgd", (ONES,))]})
    one.flush()
    pull = _Pull(one)
    other.delete(["sgd"])
    assert np.all(pull.result()[0] == 0)


def test_a_client_that_waits_can_be_closed(cluster: Cluster) -> None:
    client = cluster.client()
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

"""Counters of updates: one for each update of a push, together with other writes to them."""

from __future__ import annotations

import cloudpickle
import numpy as np
import optax
import pytest

from distribax.parameter_server import (
    Apply,
    Assign,
    AssignAdd,
    Op,
    OptimizerSpec,
    ParameterServerError,
    ParameterSpec,
)
from tests.unit.parameter_server.conftest import Cluster

VALUE = ParameterSpec("p", "p", (3,), "float32", 0)
COUNTER = ParameterSpec("n", "iterations", (), "int32", 0)
STEP = Apply("o", (np.ones(3, np.float32),))


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([STEP], 11),
        ([STEP, STEP, STEP], 13),
        ([Assign("n", np.int32(5)), STEP], 6),
        ([STEP, Assign("n", np.int32(5))], 5),
        ([STEP, AssignAdd("n", np.int32(5)), STEP], 17),
        ([AssignAdd("n", np.int32(5)), STEP, STEP], 17),
    ],
    ids=["one", "three", "set before", "set after", "between", "added before"],
)
def test_a_counter_counts_the_updates_of_a_push(
    any_cluster: Cluster, operations: list[Op], expected: int
) -> None:
    client = any_cluster.client()
    client.create(VALUE, np.zeros(3, np.float32))
    client.create(COUNTER, np.int32(10))
    transformation = cloudpickle.dumps(optax.sgd(1.0))
    client.register_optimizer(0, OptimizerSpec("o", transformation, ("p",), (), counter="n"))
    before = client.pull_versions([COUNTER])[0][0]
    client.push({0: operations})
    ((version, value),) = client.pull_versions([COUNTER])
    assert value == expected and value.dtype == np.int32
    assert version != before
    np.testing.assert_array_equal(client.pull([VALUE])[0], -operations.count(STEP) * np.ones(3))


def test_a_push_that_fails_does_not_count(cluster: Cluster) -> None:
    client = cluster.client()
    client.create(VALUE, np.zeros(3, np.float32))
    client.create(COUNTER, np.int32(10))
    spec = OptimizerSpec("o", cloudpickle.dumps(optax.sgd(1.0)), ("p",), (), counter="n")
    client.register_optimizer(0, spec)
    client.push({0: [STEP, AssignAdd("n", np.ones(4, np.int32))]})
    with pytest.raises(ParameterServerError, match="shape"):
        client.flush()
    assert client.pull([COUNTER]) == [10]

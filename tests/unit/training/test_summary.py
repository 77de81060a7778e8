"""`dx.summary` and `dx.visualize`: what they say of each strategy."""

from __future__ import annotations

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import distribax as dx
from distribax.execution import named_objects
from distribax.testing.local_servers import local_servers
from distribax.training.summary import draw_mesh


def test_summary_of_mirrored_variables_and_their_optimizer() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = dx.Variable(np.zeros((256, 8), np.float32), name="w")
        optimizer = dx.Optimizer(optax.adam(0.1))
        loss = dx.metrics.Mean("loss")
    optimizer.build([w])
    told = dx.summary(strategy)
    found = {each.name: each for each in told.variables}
    assert found["w"].role == "trainable"
    assert found["w"].placement == "mirrored on 2 devices"
    assert list(found["w"].bytes_per_device.values()) == [8192, 8192]
    assert {each.role for each in told.variables} == {"trainable", "optimizer state", "metric"}
    assert found["loss/total"].placement == "one value for each of 2 replicas"
    state = [each for each in told.variables if each.role == "optimizer state"]
    assert sum(each.shape == (256, 8) for each in state) == 2, "Adam keeps two for each parameter"
    assert sum(told.bytes_per_device.values()) >= 3 * 2 * 8192
    text = str(told)
    assert text == repr(told)
    assert "mesh: replica=2" in text and "│ CPU:0 │ CPU:1 │" in text
    assert "8 KiB" in text and "MirroredStrategy: 2 replicas, here on CPU:0, CPU:1" in text
    assert loss is not None
    assert [v.name for v in dx.summary(strategy, net={"w": w}).variables] == ["net.w"]


def test_summary_of_other_strategies_and_models() -> None:
    central = dx.CentralStorageStrategy(["CPU:1", "CPU:2"], parameter_device="CPU:0")
    with central.scope():
        v = dx.Variable(1.0, name="v")
        (only,) = dx.summary().variables
    assert only.placement == "on CPU:0" and v is not None
    one = dx.OneDeviceStrategy("CPU:3")
    assert "no variables" in str(dx.summary(one))
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    rows = dx.summary(one, model=model).variables
    assert {"model.kernel", "model.bias"} <= {row.name for row in rows}
    halves = dx.ShardedVariable([dx.Variable([0.0, 1.0]), dx.Variable([2.0])])
    assert [row.name for row in dx.summary(one, table=halves).variables] == [
        "table.shard_0",
        "table.shard_1",
    ]
    assert "shard 1, (1,): CPU:0" in dx.visualize(halves)


def test_meshes_are_drawn() -> None:
    devices = np.array(jax.devices("cpu")[:4])
    drawn = draw_mesh(Mesh(devices.reshape(2, 2), ("replica", "model")))
    assert drawn.splitlines()[0] == "mesh: replica=2, model=2"
    assert "│ 1, 0  │ 1, 1  │" in drawn.replace("│  1, 0 ", "│ 1, 0  ").replace(
        "│  1, 1 ", "│ 1, 1  "
    )
    assert draw_mesh(Mesh(devices.reshape(1, 2, 2), ("a", "b", "c"))) == "mesh: a=1, b=2, c=2"


def test_visualize_says_which_device_has_which_part() -> None:
    devices = np.array(jax.devices("cpu")[:2])
    sharding = NamedSharding(Mesh(devices, ("x",)), PartitionSpec(None, "x"))
    array = jax.device_put(jnp.zeros((3, 4, 5)), sharding)
    assert dx.visualize(array).splitlines() == [
        "Array, float32 (3, 4, 5)",
        "  CPU:0  [0:3, 0:2, 0:5]",
        "  CPU:1  [0:3, 2:4, 0:5]",
    ]
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = dx.Variable([1.0, 2.0])
        own = dx.metrics.Sum("s").variables[0]
    assert dx.visualize(v).splitlines()[1:] == ["  CPU:0  all", "  CPU:1  all"]
    assert "CPU:1  value of its replica" in dx.visualize(own)
    ids = strategy.run(lambda: dx.get_replica_context().replica_id + jnp.zeros(3))
    assert "CPU:1  value 1, (3,)" in dx.visualize(ids)
    with pytest.raises(TypeError, match="list has no devices"):
        dx.visualize([1])


def test_optimizers_of_a_strategy_that_has_ended_are_not_asked() -> None:
    with local_servers() as served, served.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1))
        with named_objects.pickle_for(served):
            cloudpickle.dumps(optimizer)  # From now on, a worker may have built it.
    with dx.OneDeviceStrategy("CPU:0").scope():
        w = dx.Variable(1.0, name="w")
    assert "w " in str(dx.summary(w.distribute_strategy, w=w))
    assert optimizer.owned_variables

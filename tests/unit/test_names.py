"""TensorFlow's names that code brings along: each exists here, or says what to write instead."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.cluster import ClusterDef, JobDef, ServerConfig, ServerDef
from distribax.contrib import tensorflow_names


def _look_up(path: str) -> Any:
    found: Any = dx
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("row", tensorflow_names.read_table(), ids=lambda row: row.tensorflow)
def test_what_the_table_names_exists(row: tensorflow_names.Name) -> None:
    if row.here.startswith("dx."):
        assert _look_up(row.here) is not None
    elif row.here.startswith("jnp."):
        assert hasattr(jnp, row.here.removeprefix("jnp."))
    elif row.here.startswith("jax."):
        module, _, name = row.here.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    else:
        assert " " in row.here  # A phrase.


@pytest.mark.parametrize("module", [dx, dx.experimental], ids=["dx", "dx.experimental"])
def test_what_is_loaded_on_use_is_listed(module: Any) -> None:
    """A notebook completes the names that `dir` returns."""
    assert {"ParameterServerStrategy", "TPUStrategy", "partitioners"} <= set(dir(module))


def test_names_are_given_once() -> None:
    names = [row.tensorflow for row in tensorflow_names.read_table()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("distribute", r"`tf.distribute.X` is `dx.X`"),
        ("distribute_lib", "never public"),
        ("keras", "import keras"),
        ("reduce_sum", r"write jnp.sum for tf.reduce_sum"),
        ("GradientTape", r"tf.GradientTape is dx.value_and_grad here"),
        ("profiler", "jax.profiler"),
        ("nn", r"tf.nn.compute_average_loss, for example, is dx.compute_average_loss"),
        ("no_such_name", r"docs/guide/migrating.md"),
    ],
)
def test_what_is_missing_says_what_to_write(name: str, way_out: str) -> None:
    with pytest.raises(AttributeError, match=f"'distribax' has no attribute '{name}'.*{way_out}"):
        getattr(dx, name)


def test_what_is_missing_in_experimental_says_so() -> None:
    with pytest.raises(AttributeError, match=r"'distribax.experimental' has no attribute 'other'"):
        _ = dx.experimental.other


def test_aliases_are_the_same_objects() -> None:
    assert dx.experimental.partitioners is dx.partitioners
    assert dx.experimental.CollectiveHints is dx.CommunicationOptions
    assert dx.coordinator.PerWorkerValue is dx.coordinator.PerWorkerValues
    resolvers = dx.cluster_resolver
    assert resolvers.KubernetesExecutableLocation is resolvers.ExecutableLocation
    assert dx.train.ClusterSpec is dx.ClusterSpec
    assert dx.train.Checkpoint is dx.Checkpoint
    assert dx.get_tower_context is dx.contrib.distribute.get_tower_context
    assert dx.get_variable is dx.contrib.distribute.get_variable


def test_old_arguments_of_multi_worker_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = dx.experimental.MultiWorkerMirroredStrategy(
        communication=dx.experimental.CollectiveCommunication.RING
    )
    assert isinstance(strategy, dx.MultiWorkerMirroredStrategy)
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    with pytest.raises(ValueError, match=r"implementation='PIGEON' is not"):
        dx.experimental.MultiWorkerMirroredStrategy(communication="PIGEON")


def test_clusters_are_given_as_definitions() -> None:
    spec = dx.ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": {3: "p3:1"}})
    definition = spec.as_cluster_def()
    assert definition == ClusterDef(
        [JobDef("ps", {3: "p3:1"}), JobDef("worker", {0: "w0:1", 1: "w1:1"})]
    )
    assert dx.ClusterSpec(definition) == spec
    # A protocol buffer has the same attributes.
    like = SimpleNamespace(job=[SimpleNamespace(name="worker", tasks={0: "w0:1"})])
    assert dx.ClusterSpec(like).as_dict() == {"worker": ["w0:1"]}


def test_servers_are_given_as_definitions(caplog: pytest.LogCaptureFixture) -> None:
    cluster = ClusterDef([JobDef("worker", {0: "localhost:1", 1: "localhost:2"})])
    server = dx.Server(ServerDef(cluster, "worker", 1), start=False)
    assert server.target == "grpc://localhost:2"
    config = SimpleNamespace(SerializeToString=lambda: b"")
    server = dx.Server(cluster, job_name="worker", task_index=0, config=config, start=False)
    assert server.target == "grpc://localhost:1"
    assert "has no effect" in caplog.text
    with pytest.raises(TypeError, match="config=5 is a int"):
        dx.Server(cluster, "worker", 0, config=5, start=False)  # type: ignore[arg-type]
    dx.Server(cluster, "worker", 0, protocol="grpc", config=ServerConfig(), start=False)


def test_tpus_are_mirrored_and_named_in_the_error() -> None:
    strategy = dx.TPUStrategy(experimental_device_assignment=jax.local_devices()[:2])
    assert strategy.num_replicas_in_sync == 2
    with pytest.raises(RuntimeError, match=r"TPUStrategy: JAX finds no TPU .*MirroredStrategy"):
        dx.TPUStrategy()


def test_group_waits_for_nests() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    per_replica = strategy.run(lambda: jnp.ones(3))
    dx.group(per_replica, [jnp.ones(2)], {"a": np.ones(1)}, None, name="g")


def test_numpy_data_set_of_the_current_strategy() -> None:
    dataset = dx.experimental_make_numpy_dataset((np.arange(3), np.arange(3.0)))
    assert [(int(x), float(y)) for x, y in dataset] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_tensor_shapes() -> None:
    shape = dx.TensorShape([None, 3])
    assert (shape.rank, shape.ndims, shape.as_list(), shape.dims) == (2, 2, [None, 3], [None, 3])
    assert not shape.is_fully_defined()
    assert shape.num_elements() is None
    assert shape.is_compatible_with([5, 3])
    assert not shape.is_compatible_with([5, 4])
    assert not shape.is_compatible_with([3])
    assert shape.merge_with([5, None]) == (5, 3)
    assert shape.concatenate([7]) == (None, 3, 7)
    assert (shape[1], shape[1:], type(shape[:1])) == (3, (3,), dx.TensorShape)
    assert (str(shape), repr(shape), str(shape[1:])) == (
        "(None, 3)",
        "TensorShape([None, 3])",
        "(3,)",
    )
    known = dx.TensorShape(4)
    assert (known, known.num_elements()) == ((4,), 4)
    assert jnp.zeros(known).shape == (4,)
    assert dx.TensorShape([-1, 2]) == (None, 2)
    with pytest.raises(ValueError, match=r"Shapes \(None, 3\) and \(2, 2\) are not compatible"):
        shape.merge_with([2, 2])
    with pytest.raises(ValueError, match="dims=None is a shape of unknown rank"):
        dx.TensorShape(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dims=\[-2\] has a negative size"):
        dx.TensorShape([-2])
    with pytest.raises(TypeError, match="is not a shape"):
        dx.TensorShape(["a"])  # type: ignore[list-item]


def test_wrapped_values_are_found_by_device() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    value = strategy.run(lambda: dx.get_replica_context().replica_id_in_sync_group + jnp.ones(2))
    assert value.devices == strategy.extended.worker_devices
    assert value.get("CPU:1").tolist() == [2.0, 2.0]
    assert value.get(jax.local_devices()[0]).tolist() == [1.0, 1.0]
    inside = strategy.run(lambda: value.get() * 10)
    assert inside.get("/cpu:1").tolist() == [20.0, 20.0]
    with pytest.raises(ValueError, match=r"device='CPU:3' has no value. It has values on .*CPU:0"):
        value.get("CPU:3")
    with pytest.raises(ValueError, match="device=None has no value"):
        value.get()
    same = strategy.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(())))
    assert float(same.get()) == float(same.get("CPU:1")) == 2.0
    with pytest.raises(ValueError, match="device='CPU:3' has no value"):
        same.get("CPU:3")


@pytest.mark.parametrize("count", [1, 2])
def test_numpy_rows_are_distributed_without_batches(count: int) -> None:
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(count)])
    rows = strategy.experimental_make_numpy_dataset(np.arange(3.0))
    distributed = strategy.experimental_distribute_dataset(rows)
    seen = [
        [np.asarray(piece).tolist() for piece in strategy.experimental_local_results(element)]
        for element in distributed
    ]
    assert seen == ([[0.0], [1.0], [2.0]] if count == 1 else [[[0.0], [1.0]], [[2.0], []]])
    batched = strategy.experimental_distribute_dataset(rows.shuffle(3).batch(2))
    assert len(list(batched)) == 2

"""Document 004: cluster resolvers, the coordinator, partitioners and Server, block by block."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import distribax as dx
from tests.seeds.shim import tf

SimpleClusterResolver = dx.cluster_resolver.SimpleClusterResolver
FixedShardsPartitioner = dx.partitioners.FixedShardsPartitioner
MinSizePartitioner = dx.partitioners.MinSizePartitioner

_CLUSTER = {
    "ps": ["localhost:2222", "localhost:2223"],
    "worker": ["localhost:2224", "localhost:2225", "localhost:2226"],
}


def test_task_id() -> None:
    cluster_spec = dx.ClusterSpec(_CLUSTER)
    cluster_resolver = SimpleClusterResolver(cluster_spec, task_type="worker", task_id=0)
    assert cluster_resolver.task_type == "worker"
    assert cluster_resolver.task_id == 0
    assert cluster_resolver.cluster_spec() == cluster_spec
    assert SimpleClusterResolver(cluster_spec).task_id is None


def test_task_type() -> None:
    cluster_spec = dx.ClusterSpec(_CLUSTER)
    for task_type in ("worker", "ps"):
        resolver = SimpleClusterResolver(cluster_spec, task_type=task_type, task_id=1)
        assert resolver.task_type == task_type
    assert SimpleClusterResolver(cluster_spec).task_type is None


def test_resolver_signatures() -> None:
    simple = ["cluster_spec", "master", "task_type", "task_id", "environment"]
    simple += ["num_accelerators", "rpc_layer"]
    assert list(inspect.signature(SimpleClusterResolver).parameters) == simple
    config = dx.cluster_resolver.TFConfigClusterResolver
    names = list(inspect.signature(config).parameters)
    assert names == ["task_type", "task_id", "rpc_layer", "environment"]


def test_fixed_shards_partitioner() -> None:
    partitioner = FixedShardsPartitioner(num_shards=2)
    assert list(partitioner((10, 3), tf.float32, axis=0)) == [2, 1]
    assert list(partitioner((10, 3), tf.float32, axis=1)) == [1, 2]


def test_min_size_partitioner() -> None:
    partitioner = MinSizePartitioner(min_shard_bytes=24, max_shards=4)
    assert list(partitioner((10, 3), tf.float32, axis=0)) == [4, 1]
    partitioner = MinSizePartitioner(min_shard_bytes=24, max_shards=8)
    assert list(partitioner((10, 3), tf.float32, axis=0)) == [5, 1]


def test_partitioner_is_the_base() -> None:
    names = list(inspect.signature(dx.partitioners.Partitioner.__call__).parameters)
    assert names == ["self", "shape", "dtype", "axis"]
    assert issubclass(FixedShardsPartitioner, dx.partitioners.Partitioner)
    assert issubclass(MinSizePartitioner, dx.partitioners.Partitioner)


def test_server_signatures() -> None:
    names = list(inspect.signature(dx.Server).parameters)
    assert names == [
        "server_or_cluster_def",
        "job_name",
        "task_index",
        "protocol",
        "config",
        "start",
    ]
    local = list(inspect.signature(dx.Server.create_local_server).parameters)
    assert local[:2] == ["config", "start"]


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    """Where the document has `cluster_resolver=...`: a cluster on this machine."""
    strategy = tf.distribute.experimental.ParameterServerStrategy(num_workers=2, num_ps=1)
    tf.distribute.experimental.coordinator.ClusterCoordinator(
        strategy, view="none", all_workers_timeout=300.0
    )
    yield strategy
    strategy.close()


@pytest.fixture
def coordinator(strategy: Any) -> Any:
    return tf.distribute.experimental.coordinator.ClusterCoordinator(strategy=strategy)


def test_create_per_worker_dataset(strategy: Any, coordinator: Any) -> None:
    @tf.function
    def worker_fn(iterator: Any) -> Any:
        return next(iterator)

    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(
            lambda x: tf.data.Dataset.from_tensor_slices([3] * 3)
        )

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    per_worker_iter = iter(per_worker_dataset)
    remote_value = coordinator.schedule(worker_fn, args=(per_worker_iter,))
    assert remote_value.fetch() == 3


def test_fetch(strategy: Any, coordinator: Any) -> None:
    def dataset_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices([1, 1, 1])

    with strategy.scope():
        v = tf.Variable(initial_value=0)

    @tf.function
    def worker_fn(iterator: Any) -> Any:
        def replica_fn(x: Any) -> Any:
            v.assign_add(x)
            return v.read_value()

        return strategy.run(replica_fn, args=(next(iterator),))

    distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)
    distributed_iterator = iter(distributed_dataset)
    result = coordinator.schedule(worker_fn, args=(distributed_iterator,))
    assert coordinator.fetch(result) == 1


def test_schedule_does_not_wait_and_join_does(coordinator: Any) -> None:
    names = list(inspect.signature(coordinator.schedule).parameters)
    assert names == ["fn", "args", "kwargs"]

    def slow(x: int, *, y: int) -> int:
        threading.Event().wait(0.2)
        return x + y

    values = [coordinator.schedule(slow, args=(x,), kwargs={"y": 1}) for x in range(4)]
    assert not coordinator.done()
    coordinator.join()
    assert coordinator.done()
    assert coordinator.fetch(values) == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["schedule", "join", "done"])
def test_an_error_is_raised_once_by_the_next_call(coordinator: Any, method: str) -> None:
    def fails() -> None:
        raise KeyError("of the function")

    failed = coordinator.schedule(fails)
    with pytest.raises(KeyError, match="of the function"):
        failed.fetch()
    arguments = (int,) if method == "schedule" else ()
    with pytest.raises(KeyError, match="of the function"):
        getattr(coordinator, method)(*arguments)
    coordinator.join()
    assert coordinator.done()
    with pytest.raises(KeyError, match="of the function"):
        failed.fetch()

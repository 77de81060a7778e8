"""Document 004: distributed data sets, block by block."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import distribax as dx
from distribax.data.rewrites import auto_shard
from tests.seeds.shim import contents, ours, tf


def _mirrored(count: int) -> dx.MirroredStrategy:
    return tf.distribute.MirroredStrategy([f"GPU:{index}" for index in range(count)])


def test_distributed_dataset(strategy: dx.MirroredStrategy) -> None:
    dataset = tf.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert isinstance(dist_dataset, dx.DistributedDataset)
    printed = []
    for x in dist_dataset:
        printed.append(str(x))
    assert "\n".join(printed) == ours(
        """PerReplica:{
  0: tf.Tensor([5.], shape=(1,), dtype=float32),
  1: tf.Tensor([6.], shape=(1,), dtype=float32)
}
PerReplica:{
  0: tf.Tensor([7.], shape=(1,), dtype=float32),
  1: tf.Tensor([8.], shape=(1,), dtype=float32)
}"""
    )
    dataset_iterator = iter(dist_dataset)
    assert isinstance(dataset_iterator, dx.DistributedIterator)
    assert repr(next(dataset_iterator)) == ours(
        """PerReplica:{
  0: <tf.Tensor: shape=(1,), dtype=float32, numpy=array([5.], dtype=float32)>,
  1: <tf.Tensor: shape=(1,), dtype=float32, numpy=array([6.], dtype=float32)>
}"""
    )
    dataset_iterator.close()


def _first_batch(strategy: dx.MirroredStrategy) -> tuple[Any, Any]:
    dataset = tf.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
    dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))
    return next(dataset_iterator), dataset_iterator


def test_distributed_values_from_dataset(strategy: dx.MirroredStrategy) -> None:
    distributed_values, dataset_iterator = _first_batch(strategy)
    assert isinstance(distributed_values, dx.DistributedValues)
    assert repr(distributed_values) == ours(
        """PerReplica:{
  0: <tf.Tensor: shape=(1,), dtype=float32, numpy=array([5.], dtype=float32)>,
  1: <tf.Tensor: shape=(1,), dtype=float32, numpy=array([6.], dtype=float32)>
}"""
    )
    dataset_iterator.close()


def test_distributed_values_as_input_of_run(strategy: dx.MirroredStrategy) -> None:
    distributed_values, dataset_iterator = _first_batch(strategy)

    @tf.function
    def f(x: Any) -> Any:
        return x * 2.0

    assert repr(strategy.run(f, args=(distributed_values,))) == ours(
        """PerReplica:{
  0: <tf.Tensor: shape=(1,), dtype=float32, numpy=array([10.], dtype=float32)>,
  1: <tf.Tensor: shape=(1,), dtype=float32, numpy=array([12.], dtype=float32)>
}"""
    )
    dataset_iterator.close()


def test_distributed_values_reduced(strategy: dx.MirroredStrategy) -> None:
    distributed_values, dataset_iterator = _first_batch(strategy)
    reduced = strategy.reduce(tf.distribute.ReduceOp.SUM, distributed_values, axis=0)
    assert repr(reduced) == ours("<tf.Tensor: shape=(), dtype=float32, numpy=11.0>")
    dataset_iterator.close()


def test_input_context() -> None:
    context = tf.distribute.InputContext(
        num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4
    )
    assert context.get_per_replica_batch_size(8) == 2
    assert context.input_pipeline_id == 1
    assert context.num_input_pipelines == 2
    assert context.num_replicas_in_sync == 4
    with pytest.raises(ValueError, match="global_batch_size=6 does not divide"):
        context.get_per_replica_batch_size(6)


def test_distribute_datasets_from_function(strategy: dx.MirroredStrategy) -> None:
    def dataset_fn(input_context: dx.InputContext) -> Any:
        global_batch_size = 4
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = tf.data.Dataset.range(8).batch(global_batch_size)
        dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        dataset = dataset.unbatch().batch(batch_size)
        dataset = dataset.prefetch(2)
        return dataset

    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert "\n".join(str(x) for x in dist_dataset) == ours(
        """PerReplica:{
  0: tf.Tensor([0 1], shape=(2,), dtype=int64),
  1: tf.Tensor([2 3], shape=(2,), dtype=int64)
}
PerReplica:{
  0: tf.Tensor([4 5], shape=(2,), dtype=int64),
  1: tf.Tensor([6 7], shape=(2,), dtype=int64)
}"""
    )


def test_experimental_distribute_dataset(strategy: dx.MirroredStrategy) -> None:
    dataset = tf.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def f(x: Any) -> Any:
        return x * 2.0

    assert "\n".join(str(strategy.run(f, args=(x,))) for x in dist_dataset) == ours(
        """PerReplica:{
  0: tf.Tensor([10.], shape=(1,), dtype=float32),
  1: tf.Tensor([12.], shape=(1,), dtype=float32)
}
PerReplica:{
  0: tf.Tensor([14.], shape=(1,), dtype=float32),
  1: tf.Tensor([16.], shape=(1,), dtype=float32)
}"""
    )
    assert f.trace_count == 1


@pytest.mark.parametrize(
    ("dataset", "replicas"),
    [
        (
            tf.data.Dataset.range(10).batch(4, drop_remainder=False),
            [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]],
        ),
        (
            tf.data.Dataset.range(8).batch(4),
            [[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[], []]],
        ),
        (
            tf.data.Dataset.range(10).batch(5),
            [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]],
        ),
    ],
    ids=["10 by 4 on 2", "8 by 4 on 3", "10 by 5 on 3"],
)
def test_rebatching(dataset: Any, replicas: list[list[list[int]]]) -> None:
    strategy = _mirrored(len(replicas))
    steps = [contents(x) for x in strategy.experimental_distribute_dataset(dataset)]
    assert [list(pieces) for pieces in zip(*steps, strict=True)] == replicas


def test_sharding_never_loses_or_repeats_an_example() -> None:
    dataset = tf.data.Dataset.range(11).batch(4)
    for count in (1, 2, 3, 4):
        strategy = _mirrored(count)
        seen: list[int] = []
        for x in strategy.experimental_distribute_dataset(dataset):
            pieces = strategy.experimental_local_results(x)
            assert len(pieces) == count
            seen.extend(example for piece in pieces for example in piece.tolist())
        assert seen == list(range(11))


def test_the_next_batch_is_made_before_it_is_asked_for(strategy: dx.MirroredStrategy) -> None:
    ahead = threading.Event()

    def noticed(x: Any) -> Any:
        if x == 4:  # The first example of the second batch.
            ahead.set()
        return x

    dataset = tf.data.Dataset.range(8).map(noticed).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    assert contents(next(iterator)) == [[0, 1], [2, 3]]
    assert ahead.wait(timeout=300)
    iterator.close()


def test_auto_shard_policy_is_set_by_options() -> None:
    dataset = tf.data.Dataset.range(16).batch(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = dataset.with_options(options)
    part, decision = auto_shard(dataset, num_workers=2, worker_id=1)
    assert decision.policy is tf.data.experimental.AutoShardPolicy.DATA
    assert [batch.tolist() for batch in part] == [[2, 3], [6, 7], [10, 11], [14, 15]]


def _write(path: Path, numbers: range) -> str:
    with tf.data.TFRecordWriter(path) as writer:
        for number in numbers:
            writer.write(str(number).encode())
    return str(path)


def _worker_batches(dataset: Any, policy: str | None) -> list[list[list[int]]]:
    """Returns what each of two workers, with a replica each, sees."""
    if policy is not None:
        options = tf.data.Options()
        chosen = tf.data.experimental.AutoShardPolicy[policy]
        options.experimental_distribute.auto_shard_policy = chosen
        dataset = dataset.with_options(options)
    return [
        [batch.tolist() for batch in auto_shard(dataset, num_workers=2, worker_id=worker)[0]]
        for worker in range(2)
    ]


def _numbers(*files: str) -> Any:
    return tf.data.TFRecordDataset(list(files)).map(int).batch(4)


def test_auto_shard_policy_data(tmp_path: Path) -> None:
    dataset = _numbers(_write(tmp_path / "1.tfr", range(8)))
    assert _worker_batches(dataset, "DATA") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def _two_files(tmp_path: Path) -> Any:
    files = [_write(tmp_path / "1.tfr", range(4)), _write(tmp_path / "2.tfr", range(4, 8))]
    return _numbers(*files)


def test_auto_shard_policy_file(tmp_path: Path) -> None:
    assert _worker_batches(_two_files(tmp_path), "FILE") == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_auto_shard_policy_auto_is_the_default_and_tries_file(tmp_path: Path) -> None:
    dataset = _two_files(tmp_path)
    assert _worker_batches(dataset, None) == _worker_batches(dataset, "AUTO")
    assert _worker_batches(dataset, "AUTO") == _worker_batches(dataset, "FILE")


def test_auto_shard_policy_auto_falls_back_to_data(caplog: pytest.LogCaptureFixture) -> None:
    dataset = tf.data.Dataset.range(8).batch(4)
    with caplog.at_level(logging.INFO, "distribax"):
        assert _worker_batches(dataset, "AUTO") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert "chose DATA" in caplog.text


def test_auto_shard_policy_off(tmp_path: Path) -> None:
    dataset = _numbers(_write(tmp_path / "1.tfr", range(8)))
    assert _worker_batches(dataset, "OFF") == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2

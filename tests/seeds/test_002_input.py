"""Document 002: the methods of Strategy that make and distribute data sets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.data.rewrites import auto_shard
from tests.seeds.conftest import Decorator
from tests.seeds.shim import contents, tf


def _files(folder: Path) -> list[str]:
    """Writes the document's four record files: eight numbers in all."""
    names = []
    for index in range(4):
        path = folder / f"{index + 1}.tfr"
        with tf.data.TFRecordWriter(path) as writer:
            for number in (2 * index, 2 * index + 1):
                writer.write(np.float32(number).tobytes())
        names.append(str(path))
    return names


def _decoded(record: bytes) -> Any:
    return np.frombuffer(record, np.float32)[0]


# experimental_distribute_dataset.


def test_experimental_distribute_dataset(
    strategy: dx.MirroredStrategy, execution: Decorator, tmp_path: Path
) -> None:
    dataset = tf.data.TFRecordDataset(_files(tmp_path)).map(_decoded).batch(4)
    with strategy.scope():
        seen = tf.keras.metrics.Sum()

    @execution
    def train_step(x: Any) -> Any:
        seen.update_state(x)
        return x * 2

    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    results = []
    for x in dist_dataset:
        results.append(contents(strategy.experimental_run_v2(train_step, args=(x,))))
    assert results == [[[0.0, 2.0], [4.0, 6.0]], [[8.0, 10.0], [12.0, 14.0]]]
    assert float(seen.result()) == sum(range(8))


def test_a_dataset_must_be_batched_by_the_global_batch_size(
    strategy: dx.MirroredStrategy, tmp_path: Path
) -> None:
    dataset = tf.data.TFRecordDataset(_files(tmp_path))
    with pytest.raises(ValueError, match=r"not batched.*global batch size"):
        strategy.experimental_distribute_dataset(dataset)


def test_each_worker_needs_an_input_file(tmp_path: Path) -> None:
    dataset = tf.data.TFRecordDataset(_files(tmp_path)).map(_decoded).batch(5)
    with pytest.raises(ValueError, match=r"4 file\(s\) for 5 workers.*OFF"):
        auto_shard(dataset, num_workers=5, worker_id=0)


def test_files_are_sharded_among_workers(tmp_path: Path) -> None:
    dataset = tf.data.TFRecordDataset(_files(tmp_path)).map(_decoded).batch(4)
    workers = [auto_shard(dataset, num_workers=2, worker_id=worker) for worker in range(2)]
    assert [decision.policy.name for _, decision in workers] == ["FILE", "FILE"]
    rows = [[row for batch in part for row in batch.tolist()] for part, _ in workers]
    assert rows == [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]


def test_other_data_is_sharded_at_the_end_with_a_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mapped: list[int] = []

    def preprocess(x: Any) -> Any:
        mapped.append(int(x))
        return x

    dataset = tf.data.Dataset.range(8).map(preprocess).batch(4)
    with caplog.at_level(logging.INFO, "distribax"):
        part, decision = auto_shard(dataset, num_workers=2, worker_id=0)
    assert decision.policy.name == "DATA"
    assert "every worker runs the whole pipeline" in caplog.text.lower()
    assert [batch.tolist() for batch in part] == [[0, 1], [4, 5]]
    # The redundant work: this worker has preprocessed the other's examples too.
    assert sorted(set(mapped)) == list(range(8))


def test_sharding_among_workers_can_be_disabled_but_not_the_split_among_replicas() -> None:
    dataset = tf.data.Dataset.range(8).batch(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options)
    part, _ = auto_shard(dataset, num_workers=2, worker_id=1)
    assert [row for batch in part for row in batch.tolist()] == list(range(8))
    strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert [contents(x) for x in dist_dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_no_transformations_can_be_added_to_a_distributed_dataset(
    strategy: dx.MirroredStrategy,
) -> None:
    dataset = tf.data.Dataset.range(4).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    for name in ("map", "batch", "shuffle", "repeat", "prefetch"):
        assert hasattr(dataset, name)
        assert not hasattr(dist_dataset, name)
    # It is iterated like an ordinary one, as often as one likes.
    assert [contents(x) for x in dist_dataset] == [contents(x) for x in dist_dataset]


# experimental_distribute_datasets_from_function.


def test_experimental_distribute_datasets_from_function(
    strategy: dx.MirroredStrategy, execution: Decorator
) -> None:
    global_batch_size = 4
    contexts: list[dx.InputContext] = []

    def dataset_fn(input_context: dx.InputContext) -> Any:
        contexts.append(input_context)
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = tf.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    @execution
    def replica_fn(batch: Any) -> Any:
        return jnp.sum(batch)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    replica_results = []
    for batch in inputs:
        assert [piece.shape for piece in batch.values] == [(2, 1, 1), (2, 1, 1)]
        replica_results.append(strategy.experimental_run_v2(replica_fn, args=(batch,)))
        if len(replica_results) == 3:
            break
    assert [contents(result) for result in replica_results] == [[2.0, 2.0]] * 3
    assert contexts == [dx.InputContext(1, 0, 2)]


def test_each_replica_dequeues_one_batch_a_step(strategy: dx.MirroredStrategy) -> None:
    calls: list[dx.InputContext] = []

    def dataset_fn(input_context: dx.InputContext) -> Any:
        calls.append(input_context)
        return tf.data.Dataset.range(8).batch(2)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    assert [contents(x) for x in inputs] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert len(calls) == 1


def test_dataset_fn_replicas_may_run_out_of_batches(strategy: dx.MirroredStrategy) -> None:
    def steps(drop_remainder: bool) -> list[Any]:
        inputs = strategy.experimental_distribute_datasets_from_function(
            lambda _: tf.data.Dataset.range(6).batch(2, drop_remainder=drop_remainder)
        )
        return [contents(x) for x in inputs]

    assert steps(drop_remainder=False) == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert steps(drop_remainder=True) == [[[0, 1], [2, 3]]]


# experimental_make_numpy_dataset.


def test_experimental_make_numpy_dataset(strategy: dx.MirroredStrategy) -> None:
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    assert isinstance(dataset, tf.data.Dataset)
    assert [float(x) for x in dataset] == [1.0] * 10
    # As the document writes it, without a batch: one row for each replica.
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert [contents(x) for x in dist_dataset] == [[[1.0], [1.0]]] * 5
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(4))
    assert [contents(x) for x in dist_dataset] == [
        [[1.0, 1.0], [1.0, 1.0]],
        [[1.0, 1.0], [1.0, 1.0]],
        [[1.0], [1.0]],
    ]


def test_numpy_dataset_of_a_nest_and_of_a_list(strategy: dx.MirroredStrategy) -> None:
    nest = {"x": np.arange(4), "y": (np.arange(4) * 10,)}
    dataset = strategy.experimental_make_numpy_dataset(nest)
    assert [(int(row["x"]), int(row["y"][0])) for row in dataset] == [
        (0, 0),
        (1, 10),
        (2, 20),
        (3, 30),
    ]
    stacked = strategy.experimental_make_numpy_dataset([np.asarray([1, 2]), np.asarray([3, 4])])
    assert [row.tolist() for row in stacked] == [[1, 2], [3, 4]]


# make_dataset_iterator and make_input_fn_iterator, which the same class had under TensorFlow 1.


def test_older_iterators(strategy: dx.MirroredStrategy) -> None:
    iterator = strategy.make_dataset_iterator(tf.data.Dataset.range(4).batch(4))
    assert contents(strategy.experimental_run(lambda x: x + 1, iterator)) == [[1, 2], [3, 4]]
    iterator.close()
    iterator = strategy.make_input_fn_iterator(lambda _: tf.data.Dataset.range(4).batch(2))
    assert contents(iterator.get_next()) == [[0, 1], [2, 3]]
    with pytest.raises(dx.OutOfRangeError):
        iterator.get_next()

"""What each replica sees of a distributed data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distribax as dx
from distribax.data.distributed import distribute_dataset, distribute_from_function
from tests.multidevice.input.replicas import flat, mirrored, pieces, rows, target

pytestmark = pytest.mark.multidevice

Dataset = dx.data.Dataset


# What each replica sees.


@pytest.mark.parametrize(
    ("dataset", "replicas", "steps"),
    [
        (Dataset.range(10).batch(4), 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (Dataset.range(8).batch(4), 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (Dataset.range(10).batch(5), 3, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]),
        (Dataset.range(4).batch(4), 3, [[[0, 1], [2, 3], []]]),
        # A function takes the batches out of pairs that could not be split.
        (Dataset.range(4).batch(4).enumerate().map(lambda i, x: x + i), 2, [[[0, 1], [2, 3]]]),
    ],
)
def test_batches_are_split_in_order(dataset: Any, replicas: int, steps: Any) -> None:
    strategy = mirrored(replicas)
    assert [rows(strategy, x) for x in strategy.experimental_distribute_dataset(dataset)] == steps


def test_even_batch_is_one_array_over_the_devices_and_uneven_one_is_pieces() -> None:
    strategy = mirrored(2)
    even, uneven = strategy.experimental_distribute_dataset(Dataset.range(7).batch(4))
    assert even.on_mesh(strategy.extended.mesh).array.shape == (4,)
    assert [v.devices() for v in even.values] == [{jax.devices()[0]}, {jax.devices()[1]}]
    assert [v.shape for v in uneven.values] == [(2,), (1,)]
    assert [v.devices() for v in uneven.values] == [{jax.devices()[0]}, {jax.devices()[1]}]


def test_single_replica_gets_plain_arrays_on_its_device() -> None:
    strategy = dx.OneDeviceStrategy("CPU:3")
    (batch,) = strategy.experimental_distribute_dataset(Dataset.range(3).batch(4))
    assert isinstance(batch, jax.Array)
    assert batch.devices() == {jax.devices()[3]}


def test_nests_keep_their_form(strategy: Any) -> None:
    data = {"x": np.arange(6.0, dtype=np.float32), "y": (np.arange(6), np.arange(12).reshape(6, 2))}
    dataset = Dataset.from_tensor_slices(data).batch(4)
    steps = list(strategy.experimental_distribute_dataset(dataset))
    assert set(steps[0]) == {"x", "y"} and isinstance(steps[0]["y"], tuple)
    assert flat(strategy, (step["x"] for step in steps)) == data["x"].tolist()
    assert flat(strategy, (step["y"][1] for step in steps)) == data["y"][1].tolist()


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 40),
    batch=st.integers(1, 9),
    replicas=st.integers(1, 4),
    drop=st.booleans(),
)
def test_every_example_reaches_one_replica_once_and_in_order(
    size: int, batch: int, replicas: int, drop: bool
) -> None:
    strategy = mirrored(replicas)
    dataset = Dataset.range(size).batch(batch, drop_remainder=drop)
    steps = [rows(strategy, x) for x in strategy.experimental_distribute_dataset(dataset)]
    seen = [row for step in steps for piece in step for row in piece]
    assert seen == list(range(size - size % batch if drop else size))
    for step in steps:
        full = -(-sum(map(len, step)) // replicas)
        assert all(len(piece) <= full for piece in step)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 9),
    workers=st.integers(1, 3),
    local=st.integers(1, 2),
    shuffled=st.booleans(),
)
def test_workers_share_every_batch_without_loss(
    size: int, batch: int, workers: int, local: int, shuffled: bool
) -> None:
    options = dx.data.Options()
    options.experimental_distribute.auto_shard_policy = dx.data.AutoShardPolicy.DATA

    def make() -> Any:
        dataset = Dataset.range(size)
        dataset = dataset.shuffle(size, seed=5) if shuffled else dataset
        return dataset.batch(batch).with_options(options)

    dataset = make()
    streams = [
        list(distribute_dataset(dataset, target(local, workers, w), dx.InputOptions()))
        for w in range(workers)
    ]
    assert len({len(stream) for stream in streams}) == 1
    expected = list(make().as_numpy_iterator())
    for parts, whole in zip(zip(*streams, strict=True), expected, strict=True):
        together = [row for part in parts for piece in pieces(part) for row in piece]
        assert together == whole.tolist()


def test_numbers_that_jax_would_cut_off_are_refused(strategy: Any) -> None:
    for size in (4, 3):  # Whole and uneven batches.
        fitting = np.array([1, -(2**31), 3, 2**31 - 1])
        dataset = Dataset.from_tensor_slices(fitting).batch(size)
        distributed = strategy.experimental_distribute_dataset(dataset)
        assert flat(strategy, distributed) == fitting.tolist()
        for large in (fitting + 1, fitting.astype(np.uint64)):
            dataset = Dataset.from_tensor_slices(large).batch(size)
            with pytest.raises(
                ValueError, match=r"a batch has \d+ in an array of u?int64, but JAX"
            ):
                list(strategy.experimental_distribute_dataset(dataset))
            with jax.enable_x64(True):
                distributed = strategy.experimental_distribute_dataset(dataset)
                assert flat(strategy, distributed) == large.tolist()


# Data sets made by a function.


def test_each_replica_takes_the_next_batch_of_the_function() -> None:
    strategy = mirrored(2)

    def dataset_fn(context: dx.InputContext) -> Any:
        size = context.get_per_replica_batch_size(4)
        return Dataset.range(8).batch(size).prefetch(2)

    steps = [rows(strategy, x) for x in strategy.distribute_datasets_from_function(dataset_fn)]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_incomplete_last_step_gives_empty_batches_or_is_dropped() -> None:
    strategy = mirrored(2)

    def steps(dataset: Any) -> list[Any]:
        distributed = strategy.distribute_datasets_from_function(lambda _: dataset)
        return [rows(strategy, x) for x in distributed]

    assert steps(Dataset.range(5).batch(2)) == [[[0, 1], [2, 3]], [[4], []]]
    assert steps(Dataset.range(6).batch(2, drop_remainder=True)) == [[[0, 1], [2, 3]]]


def test_incomplete_last_step_of_batches_that_a_function_makes_smaller() -> None:
    whole = Dataset.range(10).batch(2, drop_remainder=True)
    dataset = whole.map(lambda x: x[x % 3 != 2])
    assert dataset.element_spec.shape == (2,)  # That of the first.
    strategy = mirrored(2)

    def start() -> Any:
        return iter(strategy.distribute_datasets_from_function(lambda _: dataset))

    iterator = start()
    steps = [rows(strategy, next(iterator)) for _ in range(2)]
    assert steps == [[[0, 1], [3]], [[4], [6, 7]]]
    restored = start()
    restored.set_state(iterator.get_state())
    for rest in (iterator, restored):
        assert [rows(strategy, x) for x in rest] == [[[9], []]]


def test_incomplete_last_step_of_batches_with_a_number() -> None:
    strategy = mirrored(2)
    numbered = strategy.distribute_datasets_from_function(
        lambda context: Dataset.range(3).batch(1).map(lambda x: (x.sum() + 5, b"t", x))
    )
    steps = [tuple(rows(strategy, part) for part in step) for step in numbered]
    assert [step[0] for step in steps] == [[5, 6], [7, 0]]
    assert [step[1] for step in steps] == [[b"t", b"t"], [b"t", b""]]
    assert [step[2] for step in steps] == [[[0], [1]], [[2], []]]


def test_functions_may_make_data_sets_without_any_element() -> None:
    strategy = mirrored(2)
    for empty in (
        Dataset.from_generator(lambda: iter(())).batch(2),
        Dataset.range(0).flat_map(Dataset.range).batch(2),
        Dataset.range(0).batch(2),
        Dataset.range(0).map(lambda x: {1: x}[int(x)]).batch(2),
        Dataset.range(0).window(2).map(lambda window: window.reduce(0, max)).batch(2),
    ):
        made = strategy.distribute_datasets_from_function(lambda context, made=empty: made)
        assert list(made) == []


def test_functions_for_one_size_of_batch() -> None:
    strategy = mirrored(2)
    squares = Dataset.range(16).batch(4).map(lambda batch: batch.reshape(2, 2))
    made = strategy.distribute_datasets_from_function(lambda context: squares)
    assert flat(strategy, made) == [[i, i + 1] for i in range(0, 16, 2)]


def test_context_of_a_worker_and_of_a_replica() -> None:
    seen: list[dx.InputContext] = []

    def dataset_fn(context: dx.InputContext) -> Any:
        seen.append(context)
        return Dataset.from_tensors([context.input_pipeline_id])

    distribute_from_function(dataset_fn, target(2, 3, 1), dx.InputOptions())
    assert seen == [dx.InputContext(3, 1, 6)]
    seen.clear()
    mode = dx.InputReplicationMode.PER_REPLICA
    options = dx.InputOptions(experimental_replication_mode=mode)
    (step,) = distribute_from_function(dataset_fn, target(2, 3, 1), options)
    assert [context.input_pipeline_id for context in seen] == [2, 3]
    assert pieces(step) == [[2], [3]]


def test_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=7 .* 2 replicas. Use 6 or 8"):
        dx.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(7)
    size = dx.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(np.int64(8))
    assert type(size) is int and size == 4


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda c: c.get_per_replica_batch_size("8"), TypeError, "global_batch_size='8'"),
        (lambda c: c.get_per_replica_batch_size(8.0), TypeError, "global_batch_size=8.0"),
        (lambda c: c.get_per_replica_batch_size(0), ValueError, "global_batch_size=0"),
        (lambda c: dx.InputContext(0), ValueError, "num_input_pipelines=0"),
        (lambda c: dx.InputContext(2, 2), ValueError, "input_pipeline_id=2 is outside 0 to 1"),
        (lambda c: dx.InputContext(1, 0, 0), ValueError, "num_replicas_in_sync=0"),
    ],
)
def test_contexts_are_checked(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong(dx.InputContext())


# Anything that can be iterated.


def batches() -> Iterator[np.ndarray]:
    yield np.arange(4)
    yield np.arange(4, 7)


@pytest.mark.parametrize(
    "source",
    [
        lambda: Dataset.range(7).batch(4),
        lambda: list(batches()),
        lambda: batches,
        batches,
    ],
    ids=["dataset", "list", "generator function", "generator"],
)
def test_many_kinds_of_input(strategy: Any, source: Any) -> None:
    assert flat(strategy, strategy.experimental_distribute_dataset(source())) == list(range(7))


def test_numpy_dataset_has_rows_and_others_must_be_batched(strategy: Any) -> None:
    rows = np.arange(6.0, dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(rows)
    assert flat(strategy, strategy.experimental_distribute_dataset(dataset.batch(4))) == [*range(6)]
    # Each replica has a batch of one row; one replica takes the rows as they are.
    elements = list(strategy.experimental_distribute_dataset(dataset))
    count = strategy.num_replicas_in_sync
    assert len(elements) == -(-6 // count)
    plain = dx.data.Dataset.from_tensor_slices(rows)
    if count == 1:
        first = next(iter(strategy.experimental_distribute_dataset(plain)))
        assert np.shape(strategy.experimental_local_results(first)[0]) == ()
    else:
        with pytest.raises(ValueError, match="not batched"):
            strategy.experimental_distribute_dataset(plain)


def test_generator_can_be_iterated_once_and_not_be_saved() -> None:
    distributed = mirrored(2).experimental_distribute_dataset(batches())
    iterator = iter(distributed)
    next(iterator)
    with pytest.raises(ValueError, match="cannot be saved"):
        iterator.get_state()
    iterator.close()
    with pytest.raises(ValueError, match="cannot be iterated twice"):
        next(iter(distributed))


# Wrong arguments.


def test_wrong_arguments_are_explained() -> None:
    strategy = mirrored(2)
    dataset = Dataset.range(4).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ValueError, match="distributed already"):
        strategy.experimental_distribute_dataset(distributed)
    with pytest.raises(TypeError, match=r"not a dx\.InputOptions"):
        strategy.experimental_distribute_dataset(dataset, dx.data.Options())
    with pytest.raises(TypeError, match=r"dataset_fn=.* is not callable"):
        strategy.distribute_datasets_from_function(dataset)
    with pytest.raises(ValueError, match="returned None"):
        strategy.distribute_datasets_from_function(lambda _: None)
    mode = dx.InputReplicationMode.PER_REPLICA
    options = dx.InputOptions(experimental_replication_mode=mode)
    with pytest.raises(ValueError, match="PER_REPLICA needs an input function"):
        strategy.experimental_distribute_dataset(dataset, options)
    with pytest.raises(ValueError, match="experimental_place_dataset_on_device"):
        dx.InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(TypeError, match="experimental_fetch_to_device='no' of type str"):
        dx.InputOptions(experimental_fetch_to_device="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer_size=-1"):
        dx.InputOptions(experimental_per_replica_buffer_size=-1)


def test_older_names() -> None:
    strategy = mirrored(2)
    dataset = Dataset.range(4).batch(4)
    iterator = strategy.make_dataset_iterator(dataset)
    assert iterator.initializer is None and iterator.initialize() is None
    assert rows(strategy, iterator.get_next()) == [[0, 1], [2, 3]]
    iterator = strategy.make_input_fn_iterator(lambda _: Dataset.range(4).batch(2))
    assert rows(strategy, next(iterator)) == [[0, 1], [2, 3]]
    made = strategy.experimental_distribute_datasets_from_function(lambda _: dataset)
    assert rows(strategy, next(made.make_one_shot_iterator())) == [[0, 1, 2, 3], []]
    total = strategy.experimental_run(lambda x: x.sum(), made.make_initializable_iterator())
    assert rows(strategy, total) == [6, 0]

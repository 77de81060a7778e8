"""Distributed data sets: what each replica sees, when, and from where it can go on."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distribax as dx
from distribax.data.distributed import InputTarget, distribute_dataset, distribute_from_function
from distribax.topology import replica_mesh

pytestmark = pytest.mark.multidevice

Dataset = dx.data.Dataset


def mirrored(replicas: int) -> dx.MirroredStrategy:
    return dx.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


STRATEGIES = {
    "default": dx.get_strategy,
    "one_device": lambda: dx.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: mirrored(2),
    "central_storage": lambda: dx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    return STRATEGIES[request.param]()


def rows(strategy: Any, element: Any) -> list[list[Any]]:
    """Returns each replica's rows of one step."""
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(element)]


def flat(strategy: Any, elements: Iterable[Any]) -> list[Any]:
    return [row for element in elements for piece in rows(strategy, element) for row in piece]


# What each replica sees.


@pytest.mark.parametrize(
    ("dataset", "replicas", "steps"),
    [
        (Dataset.range(10).batch(4), 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (Dataset.range(8).batch(4), 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (Dataset.range(10).batch(5), 3, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]),
        (Dataset.range(4).batch(4), 3, [[[0, 1], [2, 3], []]]),
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
    dataset = Dataset.range(size)
    dataset = dataset.shuffle(size, seed=5) if shuffled else dataset
    dataset = dataset.batch(batch).with_options(options)
    streams = [
        list(distribute_dataset(dataset, target(local, workers, w), dx.InputOptions()))
        for w in range(workers)
    ]
    assert len({len(stream) for stream in streams}) == 1
    expected = list(dataset.as_numpy_iterator())
    for parts, whole in zip(zip(*streams, strict=True), expected, strict=True):
        together = [row for part in parts for piece in pieces(part) for row in piece]
        assert together == whole.tolist()


def target(local: int, workers: int, worker: int) -> InputTarget:
    """Stands for one of several workers, each with `local` replicas, without starting them."""
    devices = tuple(jax.devices()[:local])
    return InputTarget(devices, replica_mesh(devices), local * workers, workers, worker)


def pieces(element: Any) -> list[Any]:
    values = element.values if isinstance(element, dx.PerReplica) else [element]
    return [np.asarray(value).tolist() for value in values]


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


def test_numpy_dataset_has_rows_and_must_be_batched(strategy: Any) -> None:
    dataset = strategy.experimental_make_numpy_dataset(np.arange(6.0, dtype=np.float32))
    assert flat(strategy, strategy.experimental_distribute_dataset(dataset.batch(4))) == [*range(6)]
    with pytest.raises(ValueError, match="not batched"):
        strategy.experimental_distribute_dataset(dataset)


def test_generator_can_be_iterated_once_and_not_be_saved() -> None:
    distributed = mirrored(2).experimental_distribute_dataset(batches())
    iterator = iter(distributed)
    next(iterator)
    with pytest.raises(ValueError, match="cannot be saved"):
        iterator.get_state()
    iterator.close()
    with pytest.raises(ValueError, match="cannot be iterated twice"):
        next(iter(distributed))


# Iterators.


def test_dataset_can_be_iterated_many_times_and_left_early(strategy: Any) -> None:
    distributed = strategy.experimental_distribute_dataset(Dataset.range(100).batch(4))
    for _ in range(3):
        for _x in distributed:
            break
    assert flat(strategy, distributed) == list(range(100))


def test_threads_end_with_their_iterators() -> None:
    def threads() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("distribax")}

    distributed = mirrored(2).experimental_distribute_dataset(Dataset.range(1000).batch(4))
    iterator = iter(distributed)
    next(iterator)
    assert "distribax-input" in threads()
    iterator.close()
    assert "distribax-input" not in threads()


def test_error_in_map_reaches_the_loop_with_its_traceback() -> None:
    def decode(x: Any) -> Any:
        if x == 5:
            raise KeyError("no such record")
        return x

    strategy = mirrored(2)
    distributed = strategy.experimental_distribute_dataset(Dataset.range(8).map(decode).batch(4))
    iterator = iter(distributed)
    assert rows(strategy, next(iterator)) == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="no such record") as caught:
        next(iterator)
    assert "decode" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(KeyError):
        next(iterator)


def test_end_is_said_again_and_again() -> None:
    iterator = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(4).batch(4)))
    assert iterator.get_next_as_optional().has_value()
    for _ in range(2):
        with pytest.raises(dx.OutOfRangeError):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
    absent = iterator.get_next_as_optional()
    assert not absent.has_value()
    with pytest.raises(ValueError, match="has_value"):
        absent.get_value()


def test_closed_iterator_says_so() -> None:
    iterator = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(8).batch(4)))
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


@pytest.mark.parametrize("buffer_size", [0, 1, 3])
@pytest.mark.parametrize("fetch", [True, False])
def test_buffers_change_no_value(buffer_size: int, fetch: bool) -> None:
    options = dx.InputOptions(
        experimental_per_replica_buffer_size=buffer_size, experimental_fetch_to_device=fetch
    )
    strategy = mirrored(2)
    distributed = strategy.experimental_distribute_dataset(Dataset.range(10).batch(4), options)
    assert flat(strategy, distributed) == list(range(10))
    first = next(iter(distributed)).values[0]
    assert isinstance(first, jax.Array if fetch else np.ndarray)


def test_element_spec_says_what_each_replica_gets() -> None:
    dataset = Dataset.range(8).batch(4, drop_remainder=True)
    spec = mirrored(2).experimental_distribute_dataset(dataset).element_spec
    assert [s.shape for s in spec.specs] == [(2,), (2,)]
    assert mirrored(1).experimental_distribute_dataset(dataset).element_spec.shape == (4,)


# Saving and restoring.


@settings(max_examples=25, deadline=None)
@given(
    consumed=st.integers(0, 12), before=st.integers(1, 4), after=st.integers(1, 4), seed=st.integers()
)
def test_position_goes_on_with_another_number_of_replicas(
    consumed: int, before: int, after: int, seed: int
) -> None:
    dataset = Dataset.range(45).shuffle(16, seed=seed).repeat(2).batch(8)
    first, second = mirrored(before), mirrored(after)
    iterator = iter(first.experimental_distribute_dataset(dataset))
    head = [next(iterator) for _ in range(consumed)]
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    resumed = iter(second.experimental_distribute_dataset(dataset))
    resumed.set_state(state)
    everything = [row for batch in dataset.as_numpy_iterator() for row in batch.tolist()]
    assert flat(first, head) + flat(second, resumed) == everything


def test_position_far_into_the_data_is_exact() -> None:
    strategy = mirrored(2)
    distributed = strategy.experimental_distribute_dataset(Dataset.range(400).batch(4))
    iterator = iter(distributed)
    for _ in range(77):
        next(iterator)
    state = iterator.get_state()
    iterator.close()
    resumed = iter(distributed)
    resumed.set_state(state)
    assert flat(strategy, resumed) == list(range(308, 400))


def test_position_of_a_worker_with_its_own_data_fits_only_that_worker() -> None:
    def start(worker: int, workers: int) -> Any:
        made = distribute_from_function(
            lambda c: Dataset.range(8).shard(c.num_input_pipelines, c.input_pipeline_id).batch(1),
            target(2, workers, worker),
            dx.InputOptions(),
        )
        return iter(made)

    state = start(1, 2).get_state()
    start(1, 2).set_state(state)
    for other in (start(0, 2), start(0, 1)):
        with pytest.raises(ValueError, match="worker 1 of 2"):
            other.set_state(state)


def test_strange_positions_are_refused() -> None:
    strategy = mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(8).batch(4)))
    with pytest.raises(ValueError, match="is not a position"):
        iterator.set_state({"version": 99})
    options = dx.InputOptions(experimental_replication_mode=dx.InputReplicationMode.PER_REPLICA)
    own = [
        iter(s.distribute_datasets_from_function(lambda _: Dataset.range(4).batch(1), options))
        for s in (strategy, mirrored(3))
    ]
    with pytest.raises(ValueError, match="2 pipelines, this iterator has 3"):
        own[1].set_state(own[0].get_state())


def test_iterator_is_saved_and_restored_by_checkpoint(tmp_path: Any) -> None:
    strategy = mirrored(2)
    distributed = strategy.experimental_distribute_dataset(
        Dataset.range(24).shuffle(24, seed=3).batch(4)
    )
    with strategy.scope():
        step = dx.Variable(0)
    iterator = iter(distributed)
    checkpoint = dx.Checkpoint(step=step, iterator=iterator)
    for _ in range(3):
        next(iterator)
        step.assign_add(1)
    path = checkpoint.save(tmp_path / "three")
    rest = flat(strategy, iterator)
    step.assign(0)
    checkpoint.restore(path)
    assert int(step) == 3
    assert flat(strategy, iterator) == rest and len(rest) == 12


# In dx.function.


def test_next_inside_a_function_is_fed_at_each_call(strategy: Any) -> None:
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(12).batch(4)))

    @dx.function
    def step(iterator: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(next(iterator),)))

    assert [int(step(iterator)) for _ in range(3)] == [6, 22, 38]
    assert step.trace_count == 1
    with pytest.raises(StopIteration):
        step(iterator)


def test_partial_batch_inside_a_function_is_exact() -> None:
    strategy = mirrored(3)
    iterator = iter(
        strategy.experimental_distribute_dataset(
            Dataset.from_tensor_slices(np.arange(10, dtype=np.float32)).batch(6)
        )
    )

    @dx.function
    def mean() -> Any:
        return strategy.reduce("MEAN", strategy.run(lambda x: x, args=(next(iterator),)), axis=0)

    assert [float(mean()), float(mean())] == [2.5, 7.5]


def test_loop_over_a_data_set_inside_a_function(strategy: Any) -> None:
    distributed = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(np.arange(10, dtype=np.float32)).batch(4)
    )
    with strategy.scope():
        count = dx.Variable(0.0, aggregation="MEAN")

    @dx.function
    def epoch(dataset: Any) -> Any:
        def replica_fn(x: Any) -> Any:
            count.assign_add(1.0)
            return x.sum()

        total = 0.0
        for x in dataset:
            total += strategy.reduce("SUM", strategy.run(replica_fn, args=(x,)), axis=None)
        return total

    totals = [float(epoch(distributed)) for _ in range(2)]
    traces = epoch.trace_count
    totals.append(float(epoch(distributed)))
    assert totals == [45.0] * 3
    assert epoch.trace_count == traces
    assert float(count) == 9.0


# Wrong arguments.


def test_wrong_arguments_are_explained() -> None:
    strategy = mirrored(2)
    dataset = Dataset.range(4).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ValueError, match="distributed already"):
        strategy.experimental_distribute_dataset(distributed)
    with pytest.raises(TypeError, match="not a dx.InputOptions"):
        strategy.experimental_distribute_dataset(dataset, dx.data.Options())
    with pytest.raises(TypeError, match="dataset_fn=.* is not callable"):
        strategy.distribute_datasets_from_function(dataset)
    with pytest.raises(ValueError, match="returned None"):
        strategy.distribute_datasets_from_function(lambda _: None)
    with pytest.raises(ValueError, match="PER_REPLICA needs an input function"):
        mode = dx.InputReplicationMode.PER_REPLICA
        options = dx.InputOptions(experimental_replication_mode=mode)
        strategy.experimental_distribute_dataset(dataset, options)
    with pytest.raises(ValueError, match="experimental_place_dataset_on_device"):
        dx.InputOptions(experimental_place_dataset_on_device=True)
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

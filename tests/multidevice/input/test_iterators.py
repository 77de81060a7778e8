"""Distributed iterators: their end, errors, threads, positions, and use in dx.function."""

from __future__ import annotations

import json
import threading
import traceback
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distribax as dx
from distribax.data.distributed import distribute_from_function
from tests.multidevice.input.replicas import flat, mirrored, rows, target

pytestmark = pytest.mark.multidevice

Dataset = dx.data.Dataset


# Iterators.


@pytest.mark.parametrize("kind", ["function", "generator", "iterable", "from_generator"])
def test_batches_stay_what_they_were_when_their_array_is_filled_again(
    strategy: Any, kind: str
) -> None:
    # Large enough, and placed so, that JAX would use the memory as it is.
    memory = np.empty(2**17 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 2**17].view(np.float32)

    class Refilled:
        def __iter__(self) -> Any:
            for number in range(6):
                array[:] = number
                yield array

    make = Refilled().__iter__
    sources = {"function": make, "generator": make(), "iterable": Refilled()}
    source = sources.get(kind) or Dataset.from_generator(make)
    batches = list(strategy.experimental_distribute_dataset(source))
    seen = [sorted({x for piece in rows(strategy, b) for x in piece}) for b in batches]
    assert seen == [[number] for number in range(6)]


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
    consumed=st.integers(0, 12),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    seed=st.integers(),
)
def test_position_goes_on_with_another_number_of_replicas(
    consumed: int, before: int, after: int, seed: int
) -> None:
    dataset = Dataset.range(45).shuffle(16, seed=seed).repeat(2).batch(8)
    everything = [row for batch in dataset.as_numpy_iterator() for row in batch.tolist()]
    dataset = Dataset.range(45).shuffle(16, seed=seed).repeat(2).batch(8)
    first, second = mirrored(before), mirrored(after)
    iterator = iter(first.experimental_distribute_dataset(dataset))
    head = [next(iterator) for _ in range(consumed)]
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    resumed = iter(second.experimental_distribute_dataset(dataset))
    resumed.set_state(state)
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


def test_position_after_an_error_that_was_passed_over() -> None:
    def faulty(x: Any) -> Any:
        if x == 2:
            raise KeyError("label")
        return x

    strategy = mirrored(2)
    options = dx.InputOptions(experimental_per_replica_buffer_size=0)

    def start() -> Any:
        dataset = Dataset.range(10).batch(2).map(lambda x: x + faulty(x[0]) * 0)
        return iter(strategy.experimental_distribute_dataset(dataset, options))

    iterator = start()
    next(iterator)
    with pytest.raises(KeyError):
        next(iterator)
    before = start()
    before.set_state(iterator.get_state())
    with pytest.raises(KeyError):
        next(before)
    assert rows(strategy, next(iterator)) == [[4], [5]]
    after = start()
    after.set_state(iterator.get_state())
    assert flat(strategy, after) == [6, 7, 8, 9]


def test_iterator_stays_where_it_is_when_a_position_does_not_fit() -> None:
    strategy = mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(8).batch(2)))
    next(iterator)
    other = iter(strategy.experimental_distribute_dataset(Dataset.range(9).batch(2)))
    on_host = iter(Dataset.range(8).batch(2))
    for state, message in ((other.get_state(), "another pipeline"), (on_host.get_state(), "state")):
        with pytest.raises(ValueError, match=message):
            iterator.set_state(state)
    assert flat(strategy, iterator) == list(range(2, 8))


def test_positions_of_the_two_ways_to_distribute_do_not_fit_each_other() -> None:
    strategy = mirrored(2)
    divided = iter(strategy.experimental_distribute_dataset(Dataset.range(8).batch(2)))
    by_function = iter(
        strategy.distribute_datasets_from_function(lambda context: Dataset.range(8).batch(2))
    )
    with pytest.raises(ValueError, match="saved by an iterator of experimental_distribute"):
        by_function.set_state(divided.get_state())
    with pytest.raises(ValueError, match="not a position"):
        divided.set_state(by_function.get_state())


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

"""The fast ways of running a pipeline give what the plain ones give."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from distribax.data import Dataset
from tests.unit.data.reference import plain, values_of


def _arrays() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "x": random.random((50, 3, 2)).astype(np.float32),
        "y": (np.arange(50), np.array([f"{i}" for i in range(50)])),
    }


@pytest.mark.parametrize(
    "steps",
    [
        lambda d: d.batch(7),
        lambda d: d.shuffle(50, seed=1).batch(7),
        lambda d: d.shuffle(9, seed=1).batch(7, drop_remainder=True),
        lambda d: d.skip(3).shard(2, 1).batch(4),
        lambda d: d.shuffle(50, seed=1).repeat(2).batch(8),
        lambda d: d.shuffle(5, seed=1).take(20).shuffle(30, seed=2).shard(3, 0).batch(8),
        lambda d: d.repeat(2).shuffle(60, seed=4).batch(16),
        lambda d: d.repeat(3).skip(45).batch(16).repeat(2),
        lambda d: d.shuffle(50, seed=1).repeat().batch(16).take(9),
    ],
)
def test_array_indexing_equals_streaming(steps: Any) -> None:
    indexed = Dataset.from_tensor_slices(_arrays())
    streamed = indexed.filter(lambda element: True)
    assert values_of(steps(indexed)) == values_of(steps(streamed))


def test_batches_of_arrays_are_contiguous() -> None:
    for steps in (
        Dataset.from_tensor_slices(_arrays()).shard(3, 1).batch(4),
        Dataset.from_tensor_slices(_arrays()).shuffle(20).batch(4),
        Dataset.from_tensor_slices(_arrays()).batch(4),
    ):
        assert all(batch["x"].flags.c_contiguous for batch in steps)


def test_orders_too_long_to_write_down_are_streamed() -> None:
    huge = Dataset.range(2**40)
    assert values_of(huge.skip(2**39).batch(3).take(1)) == [[2**39, 2**39 + 1, 2**39 + 2]]
    seen = values_of(huge.shuffle(3, seed=1).batch(4).take(2))
    assert all(number < position + 3 for position, number in enumerate(seen[0] + seen[1]))
    assert values_of(huge.repeat(2).take(3)) == [0, 1, 2]


def _resumes_everywhere(dataset: Dataset, step: int = 1) -> None:
    iterator = dataset.make_iterator()
    states, seen = [json.dumps(iterator.get_state())], []
    for element in iterator:
        seen.append(plain(element))
        states.append(json.dumps(iterator.get_state()))
    for position in range(0, len(states), step):
        with dataset.make_iterator() as iterator:
            iterator.set_state(json.loads(states[position]))
            assert [plain(element) for element in iterator] == seen[position:]


def test_combinations_resume() -> None:
    numbers = Dataset.range(9).shuffle(9, seed=1)
    _resumes_everywhere(Dataset.zip(numbers, numbers.filter(lambda x: x != 3)).enumerate(4))
    _resumes_everywhere(Dataset.from_tensors([1, 2]).repeat(4).enumerate().batch(2))
    ragged = numbers.map(lambda n: np.full(n, n))
    _resumes_everywhere(ragged.padded_batch(2).map(lambda batch: batch.sum()))
    _resumes_everywhere(Dataset.zip({"a": numbers.enumerate(), "b": numbers}).cache().repeat(2))


def test_long_shuffles_resume() -> None:
    stream = Dataset.range(9_000).filter(lambda x: True)
    _resumes_everywhere(stream.shuffle(40, seed=1).batch(500))
    _resumes_everywhere(stream.shuffle(8_900, seed=1).batch(1000))


def test_quick_functions_in_threads_keep_order_and_resume() -> None:
    # Quick calls are handed to threads in groups; positions lie in the middle of groups too.
    dataset = Dataset.range(2_000).map(lambda x: x + 1, num_parallel_calls=3)
    assert values_of(dataset) == list(range(1, 2_001))
    _resumes_everywhere(dataset, step=211)


def test_errors_within_a_group_of_calls_lose_nothing_else() -> None:
    faults = {500, 501, 777, 1_999}

    def faulty(x: Any) -> Any:
        if int(x) in faults:
            raise KeyError(int(x))
        return x

    for dataset in (
        Dataset.range(2_000).map(faulty, num_parallel_calls=3),
        Dataset.range(2_000).map(faulty).map(lambda x: x, num_parallel_calls=3),
    ):
        seen: list[int] = []
        failed: set[int] = set()
        with dataset.make_iterator() as iterator:
            while True:
                try:
                    seen.append(int(next(iterator)))
                except KeyError as error:
                    failed.add(error.args[0])
                    if failed == {500}:
                        state = iterator.get_state()
                except StopIteration:
                    break
        assert failed == faults
        assert seen == [x for x in range(2_000) if x not in faults]
    with dataset.make_iterator() as iterator:
        iterator.set_state(state)
        with pytest.raises(KeyError, match="501"):
            next(iterator)
        assert int(next(iterator)) == 502

"""Elements that are kept: caches and their positions, arrays that users write to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from distribax.data import Dataset, as_dataset
from tests.unit.data.reference import plain, values_of


def _shuffled(cached: Callable[[Dataset], Dataset], seed: int | None) -> Dataset:
    return cached(Dataset.range(9).shuffle(9, seed=seed)).repeat(3).batch(4)


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("earlier_passes", [0, 1])
def test_a_position_in_a_cache_means_the_order_that_was_cached(
    seed: int | None, in_file: bool, steps: int, earlier_passes: int, tmp_path: Path
) -> None:
    def dataset(name: str) -> Dataset:
        filename = str(tmp_path / name) if in_file else ""
        return _shuffled(lambda data: data.cache(filename), seed)

    first = dataset("first")
    for _ in range(earlier_passes):
        values_of(first)
    iterator = first.make_iterator()
    for _ in range(steps):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = [plain(batch) for batch in iterator]
    # As in a new process: nothing is cached there.
    second = dataset("second").make_iterator()
    second.set_state(state)
    assert [plain(batch) for batch in second] == rest


def test_a_cache_of_another_order_loses_and_repeats_nothing() -> None:
    def dataset() -> Dataset:
        return _shuffled(Dataset.cache, None)

    iterator = dataset().make_iterator()
    begun = [x for _ in range(4) for x in next(iterator).tolist()]
    state = iterator.get_state()
    other = dataset()
    values_of(other)
    restored = other.make_iterator()
    restored.set_state(state)
    seen = [*begun, *(x for batch in restored for x in batch.tolist())]
    for start in range(0, 27, 9):
        assert sorted(seen[start : start + 9]) == list(range(9))


class Pair(NamedTuple):
    """An element with a class of its own."""

    first: np.ndarray
    second: np.ndarray


@pytest.mark.parametrize("in_file", [False, True])
def test_cached_elements_keep_their_class_and_their_types(in_file: bool, tmp_path: Path) -> None:
    elements = [Pair(np.arange(number), np.float32(number)) for number in range(3)]
    dataset = Dataset.from_generator(lambda: iter(elements))
    dataset = dataset.map(lambda pair: {"pair": pair, "text": "a"})
    cached = dataset.cache(str(tmp_path / "cache") if in_file else "")
    for _ in range(2):
        for own, element in zip(elements, cached, strict=True):
            assert type(element["pair"]) is Pair and element["text"] == b"a"
            np.testing.assert_array_equal(element["pair"].first, own.first)
            assert element["pair"].second.dtype == np.float32


def test_positions_from_before_caches_knew_their_order_are_read() -> None:
    dataset = Dataset.range(6).cache().batch(2)
    iterator = dataset.make_iterator()
    next(iterator)
    state = iterator.get_state()
    del state["position"]["origin"]
    iterator.set_state(state)
    assert [plain(batch) for batch in iterator] == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(4).batch(2).cache(),
        Dataset.from_tensors({"a": np.arange(3)}),
        as_dataset([np.arange(3), np.arange(3)]),
    ],
)
def test_kept_elements_cannot_be_changed_through_what_is_given_out(dataset: Dataset) -> None:
    before = values_of(dataset)
    for _ in range(2):
        for element in dataset:
            array = element["a"] if isinstance(element, dict) else element
            with pytest.raises(ValueError, match="read-only"):
                array += 1
    assert values_of(dataset) == before


@pytest.mark.parametrize("size", [2, 2**15])
@pytest.mark.parametrize(
    "step",
    [
        lambda dataset: dataset,
        lambda dataset: dataset.shuffle(5),
        lambda dataset: dataset.prefetch(3),
        lambda dataset: dataset.cache(),
    ],
)
def test_generators_may_fill_one_array_again_and_again(
    size: int, step: Callable[[Dataset], Dataset]
) -> None:
    def numbers() -> Iterator[Any]:
        array = np.empty(size)
        view = array.view()
        view.flags.writeable = False
        for number in range(5):
            array[:] = number
            yield {"array": array, "view": view}

    elements = list(step(Dataset.from_generator(numbers)))
    for name in ("array", "view"):
        assert all(set(element[name].tolist()) == {element[name][0]} for element in elements)
        assert sorted(element[name][0] for element in elements) == list(range(5))


def test_large_rows_are_where_devices_can_use_them() -> None:
    memory = np.arange(3 * 20_032 + 1, dtype=np.float32)
    start = 1 if memory.ctypes.data % 64 == 0 else 0
    batches = memory[start:][: 3 * 20_032].reshape(3, 20_032)
    assert batches.ctypes.data % 64
    elements = list(Dataset.from_tensor_slices({"batch": batches, "label": np.arange(3)}))
    for number, element in enumerate(elements):
        assert element["batch"].ctypes.data % 64 == 0
        np.testing.assert_array_equal(element["batch"], batches[number])


@pytest.mark.parametrize("width", [4, 20_001], ids=["small", "not in step with the alignment"])
def test_rows_of_a_read_only_array_are_its_own(width: int) -> None:
    rows = np.arange(3 * width, dtype=np.float32).reshape(3, width)
    rows.base.flags.writeable = False
    rows.flags.writeable = False
    assert all(np.shares_memory(row, rows) for row in Dataset.from_tensor_slices(rows))


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("width", [4, 20_032])
def test_arrays_may_change_after_a_data_set_was_made_of_them(shift: int, width: int) -> None:
    memory = np.empty(4 * width + 32, np.float32)
    start = -memory.ctypes.data % 64 // 4 + shift
    rows = memory[start:][: 4 * width].reshape(4, width)
    rows[:] = np.arange(4)[:, None]
    view = rows.view()
    view.flags.writeable = False
    one, labels = np.array(1.0), np.broadcast_to(rows[:, 0], (4, 4))
    datasets = [
        Dataset.from_tensor_slices({"rows": rows, "view": view, "labels": labels.T}).batch(2),
        Dataset.from_tensors({"rows": rows, "one": one, "view": view}),
        as_dataset([rows, rows]),
    ]
    before = [values_of(dataset) for dataset in datasets]
    rows[:] = -1
    one[...] = -1
    assert [values_of(dataset) for dataset in datasets] == before


def test_a_very_large_read_only_array_is_not_copied() -> None:
    memory = np.zeros(20_033, np.float32)
    memory.flags.writeable = False
    start = 1 if memory.ctypes.data % 64 == 0 else 0
    row = memory[start:][:20_032]
    assert row.ctypes.data % 64
    rows = np.broadcast_to(row, (4_000, 20_032))  # 320 MB, if it were copied.
    assert np.shares_memory(next(iter(Dataset.from_tensor_slices(rows))), memory)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_mapped_file_is_not_copied(tmp_path: Path, mode: Any) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(3, 2))
    rows = np.load(tmp_path / "rows.npy", mmap_mode=mode)
    elements = list(Dataset.from_tensor_slices(rows[1:]))
    assert all(np.shares_memory(element, rows) for element in elements)
    assert [plain(element) for element in elements] == [[2, 3], [4, 5]]


def test_arrays_that_nobody_can_change_are_not_copied() -> None:
    constant = np.frombuffer(b"abcd", np.uint8)
    (element,) = Dataset.from_generator(lambda: iter([constant]))
    assert np.shares_memory(element, constant)

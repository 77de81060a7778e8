"""Iterators: saving and restoring, and that nothing is left running."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import AUTOTUNE, Dataset, TextLineDataset, as_dataset
from tests.conftest import RunFresh
from tests.unit.data.reference import plain, values_of

_PATIENCE = 300.0


def _pipeline_threads() -> set[str]:
    names = (thread.name for thread in threading.enumerate() if thread.is_alive())
    return {name for name in names if name.startswith(("grain", "distribax"))}


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _slow(x: Any) -> Any:
    time.sleep(0.001)
    return x


def _threaded() -> list[Dataset]:
    source = Dataset.range(200)
    return [
        source.map(_slow, num_parallel_calls=3),
        source.map(_slow, num_parallel_calls=AUTOTUNE),
        source.map(_slow).prefetch(2),
        source.interleave(lambda x: Dataset.range(99).map(_slow), 3, num_parallel_calls=2),
        source.map(_slow, num_parallel_calls=2).batch(4).prefetch(AUTOTUNE).repeat(),
    ]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("way", ["close", "with", "drop", "break"])
def test_threads_end_when_an_iteration_is_abandoned(number: int, way: str) -> None:
    before = _pipeline_threads()
    dataset = _threaded()[number]
    iterator = dataset.make_iterator()
    # AUTOTUNE first looks at some calls before it starts threads.
    for _ in range(12):
        next(iterator)
    assert _pipeline_threads() - before
    if way == "close":
        iterator.close()
        iterator.close()
    elif way == "with":
        with iterator:
            next(iterator)
    elif way == "break":
        for _ in iterator:
            break
    del iterator
    gc.collect()
    assert _eventually(lambda: not _pipeline_threads() - before)


def test_threads_end_with_the_data() -> None:
    before = _pipeline_threads()
    iterators = [dataset.take(20).make_iterator() for dataset in _threaded()]
    for iterator in iterators:
        assert len(list(iterator)) == 20
        # take() leaves what it reads from in the middle; closing ends that too.
        iterator.close()
    assert not _pipeline_threads() - before


def test_an_exhausted_map_needs_no_close() -> None:
    before = _pipeline_threads()
    iterator = Dataset.range(30).map(_slow, 2).prefetch(2).make_iterator()
    assert len(list(iterator)) == 30
    assert not _pipeline_threads() - before
    assert next(iterator, "end") == "end"


def test_a_process_ends_with_an_open_iterator(run_forked: RunFresh) -> None:
    program = """
        import distribax.data as data
        dataset = data.Dataset.range(1000).map(lambda x: x, 2).prefetch(2).repeat()
        iterator = iter(dataset)
        print(next(iterator))
    """
    assert run_forked(program) == "0"


def test_importing_the_data_module_does_not_import_grain(run_fresh: RunFresh) -> None:
    program = """
        import sys
        import distribax.data as data
        data.Dataset.range(3).shuffle(3).batch(2).cardinality()
        print("grain" in sys.modules, "pyarrow" in sys.modules)
        list(data.Dataset.range(3))
        print("grain" in sys.modules, "pyarrow" in sys.modules)
    """
    assert run_fresh(program).split("\n") == ["False False", "True False"]


def test_a_closed_iterator_says_so() -> None:
    iterator = Dataset.range(3).make_iterator()
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    with pytest.raises(ValueError, match="closed"):
        iterator.get_state()


def test_states_of_other_pipelines_are_refused() -> None:
    state = Dataset.range(10).batch(2).make_iterator().get_state()
    iterator = Dataset.range(10).batch(3).make_iterator()
    with pytest.raises(ValueError, match=r"batch\(2\)(.|\n)*batch\(3\)"):
        iterator.set_state(state)
    with pytest.raises(ValueError, match="not a position"):
        iterator.set_state({"step": 3})
    assert plain(next(iterator)) == [0, 1, 2]


def test_a_state_is_small_whatever_the_buffer_holds() -> None:
    rows = Dataset.from_tensor_slices(np.zeros((500, 100))).filter(lambda x: True)
    iterator = rows.shuffle(200).repeat().batch(8).prefetch(2).make_iterator()
    for _ in range(50):
        next(iterator)
    assert len(json.dumps(iterator.get_state())) < 1500
    iterator.close()


def test_restoring_continues_the_numbering_of_later_passes() -> None:
    def make() -> Dataset:
        return Dataset.range(20).shuffle(20, seed=3)

    dataset = make()
    passes = [values_of(dataset) for _ in range(4)]
    other = make()
    values_of(other)
    iterator = other.make_iterator()
    begun = [plain(next(iterator)) for _ in range(7)]
    state = iterator.get_state()
    resumed = make()
    iterator = resumed.make_iterator()
    iterator.set_state(json.loads(json.dumps(state)))
    assert begun + [plain(x) for x in iterator] == passes[1]
    assert values_of(resumed) == passes[2]
    assert values_of(resumed) == passes[3]


def test_unseeded_shuffles_resume_in_another_process() -> None:
    def make() -> Dataset:
        inner = Dataset.range(3).flat_map(lambda x: Dataset.range(x * 10, x * 10 + 9).shuffle(4))
        return inner.shuffle(5).concatenate(Dataset.range(5).shuffle(5).shuffle(3)).repeat(2)

    iterator = make().make_iterator()
    states, seen = [json.dumps(iterator.get_state())], []
    for element in iterator:
        seen.append(plain(element))
        states.append(json.dumps(iterator.get_state()))
    assert len(seen) == 64
    for position in range(0, 64, 5):
        # A data set that was built anew drew other seeds; the state brings the old ones along.
        resumed = make().make_iterator()
        resumed.set_state(json.loads(states[position]))
        assert [plain(x) for x in resumed] == seen[position:]


def test_generators_resume_by_replay() -> None:
    calls: list[str] = []

    def letters() -> Any:
        calls.append("start")
        yield from ["a", "b", "c", "d"]

    dataset = Dataset.from_generator(letters)
    iterator = dataset.make_iterator()
    assert [next(iterator), next(iterator)] == [b"a", b"b"]
    state = iterator.get_state()
    other = dataset.make_iterator()
    other.set_state(state)
    assert list(other) == [b"c", b"d"]
    assert calls == ["start", "start"]
    fresh = dataset.make_iterator()
    fresh.set_state(dataset.make_iterator().get_state())
    assert list(fresh) == [b"a", b"b", b"c", b"d"]


def test_generators_are_closed() -> None:
    ended: list[bool] = []

    def endless() -> Any:
        try:
            while True:
                yield 1
        finally:
            ended.append(True)

    with Dataset.from_generator(endless).make_iterator() as iterator:
        next(iterator)
    assert ended == [True]


def test_what_cannot_be_resumed_says_so() -> None:
    iterator = as_dataset(iter([np.zeros(2)])).map(lambda x: x).make_iterator()
    with pytest.raises(ValueError, match="a generator or iterator cannot be saved"):
        iterator.get_state()


def test_caches_are_filled_once_and_shared(tmp_path: Path) -> None:
    for filename in ("", str(tmp_path / "cache")):
        calls: list[int] = []
        dataset = Dataset.range(6).map(lambda x, calls=calls: (calls.append(1), x)[1])
        cached = dataset.shuffle(6).cache(filename)
        with cached.make_iterator() as iterator:
            next(iterator)
        # Only a complete pass fills the cache.
        assert len(calls) == 6
        assert not list(tmp_path.glob("*"))
        first = values_of(cached)
        assert values_of(cached) == first
        assert values_of(cached.repeat(2)) == first + first
        assert len(calls) == 12
        state = cached.make_iterator().get_state()
        iterator = cached.make_iterator()
        assert [plain(next(iterator)) for _ in range(4)] == first[:4]
        iterator.set_state(state)
        assert [plain(x) for x in iterator] == first
    # A file serves later processes, that is, other data sets.
    assert values_of(Dataset.range(6).cache(filename)) == first
    assert [path.name for path in tmp_path.glob("*")] == ["cache"]


def test_two_iterators_may_fill_one_cache() -> None:
    cached = Dataset.range(4).shuffle(4).cache()
    one, other = cached.make_iterator(), cached.make_iterator()
    first, second = [plain(x) for x in one], [plain(x) for x in other]
    assert sorted(first) == sorted(second) == [0, 1, 2, 3]
    assert values_of(cached) == first
    # Reading while it was filled by somebody else, and going back.
    state = cached.make_iterator().get_state()
    one.set_state(state)
    assert [plain(x) for x in one] == first


def test_positions_in_files_are_byte_offsets(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{i}\n" for i in range(5)))
    names = [tmp_path / "a", tmp_path / "b"]
    for reads in (None, 2):
        dataset = TextLineDataset(names, num_parallel_reads=reads)
        expected = values_of(dataset)
        iterator = dataset.make_iterator()
        for position in range(11):
            other = dataset.make_iterator()
            other.set_state(json.loads(json.dumps(iterator.get_state())))
            assert list(other) == expected[position:]
            next(iterator, None)


def test_memory_is_not_held_by_abandoned_iterators() -> None:
    import weakref

    class Marked(np.ndarray):
        """An array that can be watched."""

    array = np.zeros((4, 2)).view(Marked)
    watch = weakref.ref(array)
    for element in Dataset.from_tensors(array).repeat().prefetch(2):
        assert element.shape == (4, 2)
        break
    del array, element
    gc.collect()
    assert _eventually(lambda: watch() is None)

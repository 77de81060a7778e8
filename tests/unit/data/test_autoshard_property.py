"""For random pipelines, sizes and numbers of workers and replicas: every element once, in order."""

from __future__ import annotations

import collections
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distribax.data import Dataset, TextLineDataset
from distribax.data.rewrites import auto_shard
from tests.unit.data.reference import Step, plain, values_of
from tests.unit.data.strategies import element_steps, shuffles

_settings = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
workers = st.integers(1, 4)
replicas = st.integers(1, 3)
batch_sizes = st.integers(1, 9)


def _splits(
    dataset: Dataset, num_workers: int, policy: str, num_replicas: int
) -> list[list[list[Any]]]:
    """Returns, for each worker and step, the pieces of its replicas."""
    result = []
    for worker in range(num_workers):
        shard, _ = auto_shard(
            dataset, num_workers, worker, policy, replicas_per_worker=num_replicas, split=True
        )
        with shard.make_iterator() as iterator:
            result.append([[plain(piece) for piece in split.pieces] for split in iterator])
    return result


@_settings
@given(
    st.integers(0, 30),
    st.lists(element_steps(), max_size=2),
    st.lists(shuffles(), max_size=1),
    batch_sizes,
    st.booleans(),
    workers,
    replicas,
)
def test_data_sharding_cuts_every_batch_among_all_replicas(
    size: int,
    steps: list[Step],
    mixers: list[Step],
    batch_size: int,
    drop: bool,
    num_workers: int,
    num_replicas: int,
) -> None:
    rows = Dataset.range(size)
    for step in [*steps, *mixers]:
        rows = step.apply(rows)
    dataset = rows.batch(batch_size, drop_remainder=drop)
    parts = _splits(dataset, num_workers, "DATA", num_replicas)
    # All workers take the same number of steps; a step's pieces in order are the global batch.
    joined = []
    for pieces in zip(*parts, strict=True):
        flat = [piece for worker in pieces for piece in worker]
        full = -(-sum(map(len, flat)) // len(flat))
        sizes = [len(piece) for piece in flat]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == full
        assert sum(0 < count < full for count in sizes) <= 1
        joined.append([row for piece in flat for row in piece])
    if not mixers:
        assert joined == values_of(dataset)
    else:
        expected = collections.Counter(values_of(rows))
        seen = collections.Counter(row for batch in joined for row in batch)
        assert not seen - expected
        lost = sum(expected.values()) - sum(seen.values())
        assert lost == (sum(expected.values()) % batch_size if drop else 0)


@_settings
@given(
    st.lists(st.integers(0, 7), min_size=4, max_size=7),
    batch_sizes,
    workers,
    replicas,
    st.booleans(),
    st.booleans(),
)
def test_file_sharding_gives_every_file_to_one_worker(
    sizes: list[int],
    batch_size: int,
    num_workers: int,
    num_replicas: int,
    interleave: bool,
    shuffle: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, size in enumerate(sizes):
            names.append(str(Path(folder) / f"{number}"))
            Path(names[-1]).write_text("".join(f"{number * 100 + i}\n" for i in range(size)))
        lines: Dataset = TextLineDataset(names)
        if interleave:
            lines = Dataset.from_tensor_slices(names).interleave(TextLineDataset, 2)
        if shuffle:
            lines = lines.shuffle(5)
        dataset = lines.map(lambda line: np.int64(line)).batch(batch_size)
        parts = _splits(dataset, num_workers, "FILE", num_replicas)
    for worker, steps in enumerate(parts):
        seen = [row for pieces in steps for piece in pieces for row in piece]
        own = range(worker, len(sizes), num_workers)
        expected = [number * 100 + i for number in own for i in range(sizes[number])]
        assert sorted(seen) == expected
        if not interleave and not shuffle:
            assert seen == expected
        # No worker takes more rows in a step than its share of the global batch.
        share = num_replicas * -(-batch_size // (num_workers * num_replicas))
        assert all(sum(map(len, pieces)) <= share for pieces in steps)


@_settings
@given(st.integers(0, 30), batch_sizes, workers, replicas)
def test_without_sharding_every_worker_sees_everything_in_order(
    size: int, batch_size: int, num_workers: int, num_replicas: int
) -> None:
    dataset = Dataset.range(size).batch(batch_size)
    for steps in _splits(dataset, num_workers, "OFF", num_replicas):
        assert [row for pieces in steps for piece in pieces for row in piece] == list(range(size))


@_settings
@given(
    st.integers(0, 30),
    st.lists(shuffles(), max_size=1),
    batch_sizes,
    st.tuples(workers, replicas),
    st.tuples(workers, replicas),
    st.integers(0, 10),
)
def test_positions_survive_a_change_of_workers(
    size: int,
    mixers: list[Step],
    batch_size: int,
    before: tuple[int, int],
    after: tuple[int, int],
    position: int,
) -> None:
    rows = Dataset.range(size)
    for mixer in mixers:
        rows = mixer.apply(rows)
    dataset = rows.repeat(2).batch(batch_size)

    def shards(count: int, per_worker: int) -> list[Any]:
        return [
            auto_shard(dataset, count, w, "DATA", replicas_per_worker=per_worker)[0]
            for w in range(count)
        ]

    def read(iterators: list[Any], limit: int) -> list[list[int]]:
        steps = []
        for _ in range(limit):
            parts = [next(iterator, None) for iterator in iterators]
            if parts[0] is None:
                assert parts.count(None) == len(parts)
                break
            steps.append([row for part in parts for row in plain(part)])
        return steps

    shards_before = shards(*before)
    first = [shard.make_iterator() for shard in shards_before]
    start = first[0].get_state()
    whole = read(first, 100)
    iterators = [shard.make_iterator() for shard in shards_before]
    for iterator in iterators:
        iterator.set_state(start)
    begun = read(iterators, position)
    state = iterators[-1].get_state()
    resumed = [shard.make_iterator() for shard in shards(*after)]
    for iterator in resumed:
        iterator.set_state(state)
    assert begun + read(resumed, 100) == whole

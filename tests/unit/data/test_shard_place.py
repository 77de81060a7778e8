"""Where in a pipeline files are divided: names that are counted, shuffled, paired and cached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import AutoShardPolicy, Dataset, TextLineDataset
from distribax.data.experimental import SHARD_HINT
from distribax.data.rewrites import auto_shard
from tests.unit.data.reference import values_of

NUM_FILES = 8


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Eight files of two lines each: 0, 1 in the first, 2, 3 in the second and so on."""
    names = []
    for number in range(NUM_FILES):
        path = tmp_path / f"file{number}"
        path.write_text(f"{2 * number}\n{2 * number + 1}\n")
        names.append(str(path))
    return names


def _rows_of(dataset: Dataset, num_workers: int, policy: str) -> list[list[int]]:
    """Returns what each worker reads; each makes its own pipeline, as processes do."""
    parts = (auto_shard(dataset, num_workers, w, policy)[0] for w in range(num_workers))
    return [[int(row) for batch in values_of(part) for row in batch] for part in parts]


def _read(names: Dataset) -> Dataset:
    return names.interleave(TextLineDataset, cycle_length=2).batch(4)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize(
    ("pipeline", "numbers"),
    [
        (lambda names: _read(names.take(4)), range(4)),
        (lambda names: _read(names.skip(3)), range(3, 8)),
        (lambda names: _read(names.shard(2, 0)), range(0, 8, 2)),
        (
            lambda names: _read(names.shuffle(8).filter(lambda name: name[-1:] != b"3")),
            {*range(8)} - {3},
        ),
        (lambda names: _read(names.shuffle(8).enumerate().map(lambda i, name: name)), range(8)),
        (lambda names: _read(Dataset.zip(names, Dataset.range(6)).map(lambda n, i: n)), range(6)),
        (lambda names: _read(names.concatenate(names)), [*range(8), *range(8)]),
        (lambda names: _read(names.shuffle(8).flat_map(Dataset.from_tensors)), range(8)),
    ],
)
def test_workers_divide_the_names_that_the_pipeline_means(
    files: list[str],
    pipeline: Callable[[Dataset], Dataset],
    numbers: Any,
    num_workers: int,
    listed: bool,
) -> None:
    rows: list[int] = []
    for worker in range(num_workers):
        # Every worker has shuffles of its own, with random seeds of their own.
        names = (
            Dataset.list_files(files, shuffle=False)
            if listed
            else Dataset.from_tensor_slices(files)
        )
        part, decision = auto_shard(pipeline(names), num_workers, worker)
        assert decision.policy is AutoShardPolicy.FILE
        rows += [int(row) for batch in values_of(part) for row in batch]
    assert sorted(rows) == sorted(row for n in numbers for row in (2 * n, 2 * n + 1))


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda lines: lines.take(10).batch(4),
        lambda lines: lines.skip(10).batch(4),
        lambda lines: lines.shard(2, 1).batch(4),
        lambda lines: lines.batch(4).take(2),
        lambda lines: lines.take_while(lambda line: int(line) < 12).batch(4),
        lambda lines: lines.unique().batch(4),
        lambda lines: lines.scan(0, lambda state, line: (state, line)).batch(4),
        lambda lines: lines.enumerate().map(lambda number, line: line).batch(4),
    ],
)
def test_auto_does_not_divide_files_whose_records_are_counted(
    files: list[str], pipeline: Callable[[Dataset], Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = pipeline(TextLineDataset(files))
    with caplog.at_level(logging.WARNING, "distribax"):
        _, decision = auto_shard(dataset, 2, 0)
    assert decision.policy is AutoShardPolicy.DATA
    assert "depends on what is read from all files together" in caplog.text
    together = sorted(row for rows in _rows_of(dataset, 2, "AUTO") for row in rows)
    assert together == sorted(int(row) for batch in values_of(dataset) for row in batch)


@pytest.mark.parametrize("policy", ["AUTO", "FILE", "HINT"])
def test_a_number_of_elements_that_is_asserted_is_that_of_all_workers(
    files: list[str], policy: str
) -> None:
    lines = TextLineDataset(files)
    count = len(list(lines))
    hinted = lines.shard(SHARD_HINT, SHARD_HINT) if policy == "HINT" else lines
    dataset = hinted.assert_cardinality(count).batch(4)
    parts = _rows_of(dataset, 2, policy)
    assert sorted(row for rows in parts for row in rows) == sorted(map(int, lines))
    assert all(len(rows) < count for rows in parts)


def test_told_to_divide_files_each_worker_counts_its_own_records(files: list[str]) -> None:
    dataset = TextLineDataset(files).take(2).batch(4)
    assert _rows_of(dataset, 2, "FILE") == [[0, 1], [2, 3]]


def test_hints_after_a_shuffle_without_a_seed_divide_the_data() -> None:
    rows: list[int] = []
    for worker in range(3):
        dataset = Dataset.range(20).shuffle(20).shard(SHARD_HINT, SHARD_HINT).batch(3)
        part, decision = auto_shard(dataset, 3, worker)
        assert decision.policy is AutoShardPolicy.HINT
        rows += np.concatenate(list(part)).tolist()
    assert sorted(rows) == list(range(20))


def test_shuffles_of_one_worker_keep_their_own_seeds() -> None:
    def make() -> Dataset:
        shuffled = Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)
        return shuffled.shard(SHARD_HINT, SHARD_HINT).batch(50)

    dataset, other = make(), make()
    orders = [values_of(auto_shard(dataset, 1, 0)[0]) for _ in range(2)]
    assert orders[0] == orders[1] != values_of(auto_shard(other, 1, 0)[0])


@pytest.mark.parametrize("policy", ["FILE", "HINT"])
def test_caches_of_names_in_files_are_kept_apart(
    files: list[str], tmp_path: Path, policy: str
) -> None:
    names = Dataset.from_tensor_slices(files)
    if policy == "HINT":
        names = names.shard(SHARD_HINT, SHARD_HINT)
    dataset = _read(names.cache(str(tmp_path / "cache")))
    for _ in range(2):
        first, second = _rows_of(dataset, 2, policy)
        assert sorted(first + second) == list(range(2 * NUM_FILES))
    kept = sorted(path.name for path in tmp_path.glob("cache*"))
    assert kept == ["cache.shard-0-of-2", "cache.shard-1-of-2"]

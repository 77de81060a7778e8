"""Dividing data sets among workers: the policies, their choice, and what they refuse."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import (
    ArrayRecordDataset,
    AutoShardPolicy,
    Dataset,
    Options,
    TextLineDataset,
    as_dataset,
)
from distribax.data.experimental import SHARD_HINT
from distribax.data.rewrites import SplitBatch, auto_shard
from tests.unit.data.reference import plain, values_of


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three files of four lines each: 0..3, 10..13 and 20..23."""
    names = []
    for number in range(3):
        path = tmp_path / f"file{number}"
        path.write_text("".join(f"{number * 10 + line}\n" for line in range(4)))
        names.append(str(path))
    return names


def _numbers(lines: Dataset) -> Dataset:
    return lines.map(lambda line: np.int64(line))


def _workers(dataset: Dataset, num_workers: int, policy: Any = None, **options: Any) -> list[Any]:
    return [
        values_of(auto_shard(dataset, num_workers, worker, policy, **options)[0])
        for worker in range(num_workers)
    ]


def _policies(dataset: Dataset, num_workers: int, policy: Any = None) -> set[AutoShardPolicy]:
    shards = [auto_shard(dataset, num_workers, w, policy) for w in range(num_workers)]
    return {decision.policy for _, decision in shards}


def test_the_examples_of_the_documents(tmp_path: Path) -> None:
    data = Dataset.range(8).batch(4)
    assert _workers(data, 2, "DATA") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    everything = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _workers(data, 2, "OFF") == [everything, everything]
    names = []
    for number in range(2):
        path = tmp_path / str(number)
        path.write_text("".join(f"{number * 4 + i}\n" for i in range(4)))
        names.append(path)
    from_files = _numbers(TextLineDataset(names)).batch(4)
    assert _workers(from_files, 2, "FILE") == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert _workers(from_files, 2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_files_are_divided_through_every_step(files: list[str]) -> None:
    lines = TextLineDataset(files)
    names = Dataset.from_tensor_slices(files)
    listed = Dataset.list_files([*files], shuffle=True, seed=1)
    for dataset in (
        lines,
        lines.map(lambda x: x).filter(lambda x: True).shuffle(3).repeat(1).prefetch(1).cache(),
        TextLineDataset(files, num_parallel_reads=2),
        TextLineDataset(names),
        names.shuffle(3, seed=2).map(lambda x: x).flat_map(TextLineDataset),
        names.cache().repeat(1).interleave(lambda x: TextLineDataset(x).map(lambda y: y), 2),
        names.with_options(Options()).prefetch(1).interleave(TextLineDataset, 3),
        listed.interleave(TextLineDataset, cycle_length=2),
        listed.flat_map(lambda name: Dataset.from_tensors(name).flat_map(TextLineDataset)),
        Dataset.zip(lines, TextLineDataset(files)).map(lambda a, b: a),
        lines.flat_map(lambda line: Dataset.from_tensors(line)),
    ):
        batched = _numbers(dataset).batch(4)
        assert _policies(batched, 2) == {AutoShardPolicy.FILE}
        first, second = (
            sorted(number for batch in batches for number in batch)
            for batches in _workers(batched, 2)
        )
        assert first == [0, 1, 2, 3, 20, 21, 22, 23]
        assert second == [10, 11, 12, 13]
        assert all(len(batch) <= 2 for batches in _workers(batched, 2) for batch in batches)


def test_concatenated_files_are_divided_one_by_one(files: list[str]) -> None:
    both = TextLineDataset(files).concatenate(TextLineDataset(files[:2]))
    shards = _workers(_numbers(both).batch(2), 2)
    assert shards[0] == [[0], [1], [2], [3], [20], [21], [22], [23], [0], [1], [2], [3]]
    assert shards[1] == [[10], [11], [12], [13], [10], [11], [12], [13]]


@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
def test_pairs_of_different_numbers_of_files_stay_together(tmp_path: Path, policy: str) -> None:
    halves, quarters = [], []
    for parts, size in ((halves, 4), (quarters, 2)):
        for start in range(0, 8, size):
            parts.append(str(tmp_path / f"{size}-{start}"))
            lines = [f"{number}\n" for number in range(start, start + size)]
            Path(parts[-1]).write_text("".join(lines))
    listed = Dataset.list_files(quarters, shuffle=False).flat_map(TextLineDataset)
    for other in (TextLineDataset(quarters), listed):
        pairs = Dataset.zip(TextLineDataset(halves), other).map(lambda x, y: int(x) - int(y))
        if policy == "FILE":
            with pytest.raises(ValueError, match=r"cannot divide .* different numbers of files"):
                auto_shard(pairs.batch(2), 2, 0, policy)
        else:
            assert _workers(pairs.batch(2), 2) == [[[0]] * 4] * 2


def test_lists_of_files_are_divided_even_if_users_read_them(files: list[str]) -> None:
    listed = Dataset.list_files(files, shuffle=False)
    sizes = listed.map(lambda name: Path(name.decode()).name).batch(3)
    assert _policies(sizes, 3) == {AutoShardPolicy.FILE}
    assert _workers(sizes, 3) == [[[b"file0"]], [[b"file1"]], [[b"file2"]]]


def test_array_records_are_divided_by_file(tmp_path: Path) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    names = [str(tmp_path / name) for name in "ab"]
    for name in names:
        writer = module.ArrayRecordWriter(name, "group_size:1")
        for number in range(2):
            writer.write(f"{name[-1]}{number}".encode())
        writer.close()
    batched = ArrayRecordDataset(names).batch(4)
    assert _workers(batched, 2) == [[[b"a0", b"a1"]], [[b"b0", b"b1"]]]


def test_caches_in_files_are_kept_apart(files: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dataset = _numbers(TextLineDataset(files)).cache(str(cache)).batch(2)
    for _ in range(2):
        first, second = _workers(dataset, 2)
        assert [number for batch in second for number in batch] == [10, 11, 12, 13]
        assert len(first) == 8
    names = sorted(path.name for path in tmp_path.glob("cache*"))
    assert names == ["cache.shard-0-of-2", "cache.shard-1-of-2"]


def test_too_few_files_is_an_error(files: list[str]) -> None:
    for dataset in (
        TextLineDataset(files),
        Dataset.from_tensor_slices(files).interleave(TextLineDataset),
        Dataset.list_files(files),
        TextLineDataset(files).concatenate(TextLineDataset(files[:1])),
    ):
        for policy in ("AUTO", "FILE"):
            with pytest.raises(ValueError, match=r"file\(s\) for 4 workers(.|\n)*DATA"):
                auto_shard(dataset.batch(2), 4, 0, policy)
        assert _policies(dataset.batch(2), 4, "DATA") == {AutoShardPolicy.DATA}


def test_auto_falls_back_to_data_and_warns_only_if_there_are_files(
    files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    lines = TextLineDataset(files)
    memory = Dataset.range(4)
    mixed = Dataset.zip(lines, memory)
    for dataset, reason in (
        (memory, r"range\(0, 4, 1\) is not read from files"),
        (memory.flat_map(lambda x: Dataset.range(x)), "does not read files"),
        (memory.take(0).flat_map(lambda x: Dataset.range(x).batch(2)), "does not read files"),
        (mixed, "range"),
        (as_dataset([np.zeros(2)]).unbatch(), r"batches\(1\)"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "distribax"):
            _, decision = auto_shard(dataset.batch(2), 2, 0)
        assert decision.policy is AutoShardPolicy.DATA
        (record,) = caplog.records
        assert "AUTO chose DATA" in record.getMessage()
        assert decision.reason in record.getMessage()
        assert record.levelno == (logging.WARNING if dataset is mixed else logging.INFO)
        with pytest.raises(ValueError, match=reason):
            auto_shard(dataset.batch(2), 2, 0, AutoShardPolicy.FILE)


def test_one_worker_has_everything_and_no_message(caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.range(5).batch(2)
    with caplog.at_level(logging.INFO, "distribax"):
        for policy in ("AUTO", "FILE", "DATA", "OFF"):
            assert _workers(data, 1, policy) == [[[0, 1], [2, 3], [4]]]
    assert not caplog.records
    assert auto_shard(data, 1, 0)[1].policy is AutoShardPolicy.OFF


def test_the_policy_comes_from_the_options_of_the_data_set() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    data = Dataset.range(4).batch(2).with_options(options)
    assert _policies(data, 2) == {AutoShardPolicy.OFF}
    assert _policies(data, 2, AutoShardPolicy.DATA) == {AutoShardPolicy.DATA}


def test_hints_mark_where_to_shard() -> None:
    hinted = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).map(lambda x: x).batch(4)
    for policy in ("HINT", "AUTO"):
        assert _workers(hinted, 2, policy) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert _workers(hinted, 1, "HINT") == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    with pytest.raises(ValueError, match="SHARD_HINT"):
        auto_shard(Dataset.range(8).batch(4), 2, 0, "HINT")


def test_data_sharding_makes_unseeded_shuffles_agree() -> None:
    def make() -> Dataset:
        inner = Dataset.range(6).flat_map(lambda x: Dataset.range(x * 5, x * 5 + 5).shuffle(5))
        return Dataset.zip(inner.shuffle(7).shuffle(9), Dataset.range(30).shuffle(30)).batch(4)

    # Every worker builds the data set in its own process.
    shards = [auto_shard(make(), 2, worker, "DATA")[0] for worker in range(2)]
    passes = []
    for _ in range(2):
        first, second = (values_of(shard) for shard in shards)
        pairs = list(zip(first, second, strict=True))
        joined = [[a[i] + b[i] for a, b in pairs] for i in range(2)]
        for column in joined:
            assert sorted(number for batch in column for number in batch) == list(range(30))
        passes.append(joined)
    # Each pass has its own order, and so has each shuffle.
    assert passes[0] != passes[1]
    assert passes[0][0] != passes[0][1]
    seeded = [auto_shard(make(), 2, 0, "DATA", seed=seed)[0] for seed in (1, 1, 2)]
    one, again, other = (values_of(shard) for shard in seeded)
    assert one == again != other


def test_a_step_that_is_used_twice_keeps_one_order() -> None:
    shuffled = Dataset.range(20).shuffle(20)
    pairs = Dataset.zip(shuffled, shuffled).batch(4)
    (shard, _) = auto_shard(pairs, 2, 0, "DATA")
    assert all(np.array_equal(a, b) for a, b in shard)


def test_workers_with_several_replicas_get_pieces_in_global_order() -> None:
    data = Dataset.range(10).batch(10)
    # Ten rows on 2 x 2 replicas are cut by threes: 3, 3 and 3, 1.
    for dataset in (data, data.map(lambda x: x), data.prefetch(1).repeat(1)):
        pieces = []
        for worker in range(2):
            shard, _ = auto_shard(dataset, 2, worker, "DATA", replicas_per_worker=2, split=True)
            (split,) = shard
            assert isinstance(split, SplitBatch)
            assert np.array_equal(np.concatenate(split.pieces), split.batch)
            assert all(np.shares_memory(piece, split.batch) for piece in split.pieces if len(piece))
            pieces += [plain(piece) for piece in split.pieces]
        assert pieces == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert _workers(data, 2, "DATA", replicas_per_worker=2) == [
        [[0, 1, 2, 3, 4, 5]],
        [[6, 7, 8, 9]],
    ]


def test_a_worker_without_rows_gets_an_empty_batch() -> None:
    assert _workers(Dataset.range(4).batch(4), 3, "DATA") == [[[0, 1]], [[2, 3]], [[]]]
    texts = Dataset.from_tensors("a").repeat(2).batch(4)
    assert _workers(texts, 3, "DATA") == [[[b"a"]], [[b"a"]], [[]]]


def test_off_and_file_with_several_replicas(files: list[str]) -> None:
    data = Dataset.range(7).batch(4)
    shard, _ = auto_shard(data, 2, 1, "OFF", replicas_per_worker=2, split=True)
    steps = [[plain(piece) for piece in split.pieces] for split in shard]
    assert steps == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], []]]
    # A last, smaller batch is cut no finer than the others.
    assert _workers(Dataset.range(6).batch(4), 2, "OFF")[0] == [[0, 1], [2, 3], [4, 5]]
    generator = Dataset.from_generator(lambda: iter([[1, 2, 3, 4], [5, 6]]))
    generator = generator.map(lambda *row: np.array(row))
    assert _workers(generator, 2, "OFF")[0] == [[1, 2], [3, 4], [5], [6]]


def test_specs_and_sizes_of_shards() -> None:
    data = Dataset.range(8).batch(4, drop_remainder=True)
    shard, _ = auto_shard(data, 2, 0, "DATA")
    assert shard.element_spec.shape == (2,)
    assert shard.static_batch_size == 2
    assert shard.cardinality() == 2
    split, _ = auto_shard(data, 2, 0, "DATA", replicas_per_worker=2, split=True)
    assert [spec.shape for spec in split.element_spec] == [(1,), (1,)]
    uneven, _ = auto_shard(data, 3, 0, "DATA")
    assert uneven.element_spec.shape == (None,)
    off, _ = auto_shard(data, 2, 0, "OFF")
    assert off.element_spec.shape == (2,)
    assert off.static_batch_size == 2
    assert off.cardinality() == -2
    assert auto_shard(Dataset.from_generator(lambda: [[1]]), 2, 0)[0].static_batch_size is None


def test_positions_under_data_sharding_fit_other_numbers_of_workers() -> None:
    for data in (
        Dataset.range(40).shuffle(40, seed=1).repeat().batch(8).prefetch(2),
        Dataset.range(40).filter(lambda x: True).shuffle(9, seed=1).repeat().batch(8),
    ):
        whole = data.make_iterator()
        saved = auto_shard(data, 2, 1, "DATA")[0].make_iterator()
        for _ in range(7):
            next(whole)
            next(saved)
        state = saved.get_state()
        saved.close()
        # Two workers become three, and their parts go on where the two stopped.
        shards = [auto_shard(data, 3, worker, "DATA")[0].make_iterator() for worker in range(3)]
        for shard in shards:
            shard.set_state(state)
        for _ in range(6):
            expected = plain(next(whole))
            parts = [next(shard) for shard in shards]
            assert plain(np.concatenate(parts)) == expected
        for iterator in (whole, *shards):
            iterator.close()


def test_positions_under_file_sharding_do_not_fit_other_numbers_of_workers(
    files: list[str],
) -> None:
    data = TextLineDataset(files).batch(2)
    state = auto_shard(data, 2, 0)[0].make_iterator().get_state()
    with pytest.raises(ValueError, match="another pipeline"):
        auto_shard(data, 3, 0)[0].make_iterator().set_state(state)


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(8),
        Dataset.range(8).batch(2).unbatch(),
        Dataset.range(8).batch(2).enumerate(),
        Dataset.from_tensors(np.float32(8)),
        Dataset.range(8).map(lambda x: np.zeros(4)),
        Dataset.range(8).flat_map(lambda x: Dataset.from_tensors(x)),
    ],
)
def test_data_that_was_not_batched_is_an_error(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="not batched"):
        auto_shard(dataset, 1, 0, replicas_per_worker=2)
    # One replica takes it as it is.
    auto_shard(dataset, 1, 0)


def test_batches_without_rows_are_an_error_when_they_come() -> None:
    for dataset in (
        Dataset.range(8).batch(2).map(np.sum),
        Dataset.from_generator(lambda: iter([1, 2])),
    ):
        shard, _ = auto_shard(dataset, 1, 0, replicas_per_worker=2)
        with pytest.raises(ValueError, match="no batch dimension"):
            values_of(shard)


@pytest.mark.parametrize(("workers", "worker"), [(0, 0), (2, 2), (2, -1)])
def test_workers_that_do_not_exist(workers: int, worker: int) -> None:
    with pytest.raises(ValueError, match=f"worker_id={worker} of num_workers={workers}"):
        auto_shard(Dataset.range(4).batch(2), workers, worker)


def test_workers_have_replicas() -> None:
    with pytest.raises(ValueError, match="replicas_per_worker=0"):
        auto_shard(Dataset.range(4).batch(2), 1, 0, replicas_per_worker=0)

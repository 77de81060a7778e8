"""Data sets that are written to a directory: save and load, snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.data import UNKNOWN_CARDINALITY, Dataset
from distribax.data.rewrites import auto_shard

ELEMENTS = [
    {"a": np.arange(n, dtype=np.int16), "b": (np.float64(n), b"x" * n), "c": np.array([b"", b"y"])}
    for n in range(5)
]


def _same(one: Any, two: Any) -> bool:
    return repr(one) == repr(two) and _dtypes(one) == _dtypes(two)


def _dtypes(elements: Any) -> list[Any]:
    return [(element["a"].dtype, element["b"][0].dtype) for element in elements]


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_saved_data_sets_are_loaded(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "saved"
    data = Dataset.from_generator(lambda: iter(ELEMENTS))
    with pytest.raises(FileNotFoundError, match="has no saved data set"):
        Dataset.load(path)
    data.save(path, compression)
    loaded = Dataset.load(path)
    assert _same(list(loaded), list(data))
    assert loaded.element_spec == data.element_spec
    assert len(loaded) == 5 and len(loaded.batch(2)) == 3
    iterator = loaded.make_iterator()
    next(iterator)
    resumed = Dataset.load(path).make_iterator()
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    assert _same(list(resumed), list(data)[1:])
    Dataset.range(2).save(path)
    assert [int(x) for x in Dataset.load(path)] == [0, 1]
    assert len(list(path.iterdir())) == 2
    with pytest.raises(TypeError, match="holds a data set"):
        Dataset.range(2).window(1).save(tmp_path / "windows")
    assert not list((tmp_path / "windows").iterdir())
    catalogue = path / "catalogue.json"
    older = json.loads(catalogue.read_text())
    del older["counts"], older["is_batched"]
    catalogue.write_text(json.dumps(older))
    assert Dataset.load(path).cardinality() == UNKNOWN_CARDINALITY
    catalogue.write_text(catalogue.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="saved in the format 9"):
        Dataset.load(path)


def test_saved_batches_are_divided(tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    Dataset.range(6).batch(4).save(tmp_path / "batches")
    loaded = Dataset.load(tmp_path / "batches")
    read = Dataset.load(tmp_path / "batches", reader_func=lambda files: files.flat_map(lambda f: f))
    for dataset in (loaded, read):
        steps = [x.values for x in strategy.experimental_distribute_dataset(dataset)]
        assert [[piece.tolist() for piece in step] for step in steps] == [
            [[0, 1], [2, 3]],
            [[4], [5]],
        ]
    Dataset.from_tensor_slices(np.eye(4)).save(tmp_path / "rows")
    with pytest.raises(ValueError, match="the data set is not batched"):
        strategy.experimental_distribute_dataset(Dataset.load(tmp_path / "rows"))


def test_text_that_a_function_returns_is_bytes_everywhere(tmp_path: Path) -> None:
    words = Dataset.range(2).map(lambda x: np.array(["a", f"w{x}"]))
    expected = [[b"a", b"w0"], [b"a", b"w1"]]
    assert [word.tolist() for word in words] == expected
    assert [word.tolist() for word in words.map(lambda x: x, num_parallel_calls=2)] == expected
    (batch,) = words.batch(2)
    assert batch.dtype == words.element_spec.dtype == object
    assert batch.tolist() == expected
    words.save(tmp_path / "words")
    assert [word.tolist() for word in Dataset.load(tmp_path / "words")] == expected
    with pytest.raises(TypeError, match="cannot be part of a data set's element"):
        list(Dataset.range(1).map(lambda x: np.array([1, None], object)))


def test_saved_files_are_read_as_the_user_says(tmp_path: Path) -> None:
    Dataset.range(6).save(tmp_path / "s", shard_func=lambda x: x % 2)
    assert [int(x) for x in Dataset.load(tmp_path / "s")] == [0, 1, 2, 3, 4, 5]
    part, _ = auto_shard(Dataset.load(tmp_path / "s").batch(2), 2, 1, "FILE")
    assert [batch.tolist() for batch in part] == [[1], [3], [5]]
    read = Dataset.load(tmp_path / "s", reader_func=lambda files: files.flat_map(lambda f: f))
    assert [int(x) for x in read] == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("reads", [False, True])
def test_snapshots_are_written_once(tmp_path: Path, reads: bool) -> None:
    calls = []

    def make() -> Dataset:
        def note(x: Any) -> Any:
            calls.append(int(x))
            return x

        return Dataset.range(5).map(note).snapshot(tmp_path / "s")

    next(iter(make()))  # Not complete: nothing is kept.
    if reads:
        list(make())
    iterator = make().make_iterator()
    head = [int(next(iterator)) for _ in range(2)]
    state = json.loads(json.dumps(iterator.get_state()))
    assert head + [int(x) for x in iterator] == [0, 1, 2, 3, 4]
    resumed = make().make_iterator()
    resumed.set_state(state)
    assert [int(x) for x in resumed] == [2, 3, 4]
    calls.clear()
    assert [int(x) for x in make()] == [0, 1, 2, 3, 4]
    assert not calls
    sharded = Dataset.range(4).snapshot(
        tmp_path / "t",
        shard_func=lambda x: x % 2,
        reader_func=lambda files: files.flat_map(lambda file: file),
    )
    assert [[int(x) for x in sharded] for _ in range(2)] == [[0, 1, 2, 3], [0, 2, 1, 3]]

"""CSV files: fields, types and defaults as TensorFlow 2.21 reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import Dataset
from distribax.data.experimental import CsvDataset, make_csv_dataset


@pytest.fixture
def people(tmp_path: Path) -> str:
    path = tmp_path / "people.csv"
    path.write_text('id,x,name,flag\n1,0.5,"a,b",t\n2,,c,f\n3000000000,1e3,,t\n')
    return str(path)


@pytest.fixture
def points(tmp_path: Path) -> str:
    path = tmp_path / "points.csv"
    path.write_text("p|q\n1|NA\n-2|3.5\n")
    return str(path)


def _plain(element: Any) -> Any:
    if isinstance(element, dict):
        return {name: value.tolist() for name, value in element.items()}
    return [x if isinstance(x, (bytes, dict)) else x.item() for x in element]


def test_records_have_types_and_defaults(people: str, points: str) -> None:
    defaults = [np.array([0], np.int64), [0.25], "none", str]
    rows = CsvDataset(people, defaults, header=True)
    expected = [
        [1, 0.5, b"a,b", b"t"],
        [2, 0.25, b"c", b"f"],
        [3000000000, 1000.0, b"none", b"t"],
    ]
    assert [_plain(row) for row in rows] == expected
    assert [leaf.dtype for leaf in rows.element_spec] == [np.int64, np.float32, object, object]
    for choice in ({"select_cols": [0, 2]}, {"exclude_cols": [1, 3]}):
        chosen = CsvDataset(people, [np.int64, ["none"]], header=True, **choice)
        assert [_plain(row) for row in chosen] == [[1, b"a,b"], [2, b"c"], [3000000000, b"none"]]
    other = CsvDataset(points, [[0], [9.0]], header=True, field_delim="|", na_value="NA")
    assert [_plain(row) for row in other] == [[1, 9.0], [-2, 3.5]]
    listed = CsvDataset(Dataset.from_tensor_slices([points]), [str, str], field_delim="|")
    assert [_plain(row) for row in listed] == [[b"p", b"q"], [b"1", b"NA"], [b"-2", b"3.5"]]
    plain = CsvDataset(people, [str] * 6, use_quote_delim=False, header=True)
    with pytest.raises(ValueError, match="a record has 5 fields, but 6 were expected"):
        list(plain)
    iterator = rows.make_iterator()
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.set_state(state)
    assert [_plain(row) for row in iterator] == expected[1:]


def test_records_that_do_not_fit(people: str) -> None:
    def read(defaults: Any, **options: Any) -> list[Any]:
        return list(CsvDataset(people, defaults, **{"header": True, **options}))

    with pytest.raises(ValueError, match="field 1 is missing"):
        read([np.int64, np.float32, [""], [""]])
    with pytest.raises(ValueError, match="a record has 4 fields, but 2 were expected"):
        read([np.int64, np.float32])
    with pytest.raises(ValueError, match="'3000000000', which is not a valid int32"):
        read([np.int32, [0.0], [""], [""]])
    with pytest.raises(ValueError, match="both given"):
        read([str], select_cols=[0], exclude_cols=[1])
    with pytest.raises(ValueError, match="does not fit 1 record_defaults"):
        read([str], select_cols=[2, 1])
    with pytest.raises(ValueError, match="not a single character"):
        read([str], field_delim="::")
    with pytest.raises(ValueError, match="Expected one value for a column"):
        read([[1, 2]])


def test_batches_by_column(people: str, points: str) -> None:
    options: dict[str, Any] = {"num_epochs": 1, "shuffle": False}
    made = make_csv_dataset(people, 2, **options)
    assert [_plain(batch) for batch in made] == [
        {"id": [1, 2], "x": [0.5, 0.0], "name": [b"a,b", b"c"], "flag": [b"t", b"f"]},
        {"id": [3000000000], "x": [1000.0], "name": [b""], "flag": [b"t"]},
    ]
    kinds = {name: leaf.dtype for name, leaf in made.element_spec.items()}
    assert kinds == {"id": np.int64, "x": np.float32, "name": object, "flag": object}
    labelled = make_csv_dataset(
        people, 2, label_name="flag", select_columns=["id", "flag"], **options
    )
    assert [(_plain(x), y.tolist()) for x, y in labelled] == [
        ({"id": [1, 2]}, [b"t", b"f"]),
        ({"id": [3000000000]}, [b"t"]),
    ]
    options |= {"field_delim": "|", "na_value": "NA"}
    named = make_csv_dataset(points, 3, column_names=["A", "B"], **{**options, "num_epochs": 2})
    assert [_plain(batch) for batch in named] == [
        {"A": [1, -2, 1], "B": [0.0, 3.5, 0.0]},
        {"A": [-2], "B": [3.5]},
    ]
    given = make_csv_dataset(points, 3, column_defaults=[np.int64, [7.0]], **options)
    assert [_plain(batch) for batch in given] == [{"p": [1, -2], "q": [7.0, 3.5]}]
    shuffled = make_csv_dataset(points, 2, field_delim="|", na_value="NA", shuffle_seed=1)
    assert [sorted(batch["p"].tolist()) for batch in shuffled.take(3)] == [[-2, 1]] * 3
    broken = make_csv_dataset(
        points, 2, column_defaults=[np.int32, np.float32], ignore_errors=True, **options
    )
    assert [_plain(batch) for batch in broken] == [{"p": [-2], "q": [3.5]}]
    with pytest.raises(ValueError, match="label_name='z' is not one of"):
        make_csv_dataset(people, 2, label_name="z")
    with pytest.raises(ValueError, match="select_columns has 'z'"):
        make_csv_dataset(people, 2, select_columns=["z"])


def _write(path: Path, text: str) -> str:
    path.write_bytes(text.encode("latin-1"))
    return str(path)


def test_lines_that_are_easily_lost_or_misread(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_epochs": 1, "shuffle": False}
    alone = _write(tmp_path / "alone.csv", "1\n\n3\n")
    assert [_plain(row) for row in CsvDataset(alone, [[7]])] == [[1], [7], [3]]
    named = make_csv_dataset(alone, 3, column_names=["x"], header=False, **options)
    assert [_plain(batch) for batch in named] == [{"x": [1, 0, 3]}]
    ids = _write(tmp_path / "ids.csv", "id,name\n1_000,\xe9\n\n2,b\n")
    read = make_csv_dataset(ids, 2, **options)
    assert [_plain(batch) for batch in read] == [{"id": [b"1_000", b"2"], "name": [b"\xe9", b"b"]}]
    with pytest.raises(ValueError, match="'1_000', which is not a valid int32"):
        list(CsvDataset(ids, [np.int32, str], header=True))
    header_only = CsvDataset(_write(tmp_path / "none.csv", "a,b\n"), [np.float32, [0]], header=True)
    assert [leaf.dtype for leaf in header_only.element_spec] == [np.float32, np.int32]
    assert list(header_only) == []


def test_columns_that_do_not_fit_the_files(tmp_path: Path) -> None:
    ab = _write(tmp_path / "ab.csv", "a,b\n1,2\n")
    ba = _write(tmp_path / "ba.csv", "b,a\n1,2\n")
    twice = _write(tmp_path / "twice.csv", "a,b,a\n1,2,3\n")
    short = _write(tmp_path / "short.csv", "a,b\n1\n")
    empty = _write(tmp_path / "empty.csv", "")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([ab, ba], {}, r"ba.csv has the columns \['b', 'a'\], but .*ab.csv has \['a', 'b'\]"),
        (twice, {}, "a name stands twice among the columns"),
        (ab, {"column_names": ["a"]}, "a record has 2 fields, but 1 were expected"),
        (short, {}, "a record has 1 fields, but 2 were expected"),
        (empty, {}, "empty.csv is empty"),
        (ab, {"header": False}, "nothing names the columns"),
        (ab, {"select_columns": [2]}, "select_columns has 2, which is not one of"),
        (ab, {"select_columns": ["a", 0]}, "has a column twice"),
        (ab, {"column_defaults": [0, 0, 0]}, "has 3 defaults for the columns"),
    ]
    for files, options, message in cases:
        with pytest.raises(ValueError, match=message):
            make_csv_dataset(files, 2, num_epochs=1, **options)
    both = make_csv_dataset([ab, ba], 2, column_names=["p", "q"], num_epochs=1, shuffle=False)
    assert [_plain(batch) for batch in both] == [{"p": [1, 1], "q": [2, 2]}]

"""`ignore_errors`: which elements are left out, and which errors are raised all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.data import Dataset, as_dataset


def test_errors_are_ignored(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def inverse(x: Any) -> Any:
        if not x:
            raise ZeroDivisionError
        return 1 / x

    numbers = Dataset.from_tensor_slices([1.0, 2.0, 0.0, 4.0]).map(inverse)
    assert [float(x) for x in numbers.ignore_errors()] == [1.0, 0.5, 0.25]
    assert not caplog.records
    list(numbers.ignore_errors(log_warning=True))
    assert "ZeroDivisionError" in caplog.text
    names = [tmp_path / "damaged", tmp_path / "sound"]
    names[0].write_bytes(b"12345")
    with dx.data.TFRecordWriter(str(names[1])) as writer:
        writer.write(b"record")
    assert list(dx.data.TFRecordDataset(names).ignore_errors()) == [b"record"]

    def broken() -> Any:
        yield 1
        raise KeyError

    assert [int(x) for x in Dataset.from_generator(broken).ignore_errors()] == [1]

    class Stuck:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise KeyError("again")

    with pytest.raises(KeyError, match="again"):
        list(as_dataset(Stuck()).ignore_errors())
    with pytest.raises(ValueError, match="has only 3"):
        list(Dataset.range(3).assert_cardinality(4).prefetch(2).ignore_errors())
    with pytest.raises(FileNotFoundError):
        list(dx.data.TextLineDataset("missing").shuffle(2).ignore_errors())


def _whole(x: Any) -> Any:
    if 2 < x < 6:
        raise ValueError("damaged")
    return x


@pytest.mark.parametrize(
    "hold",
    [
        lambda numbers: numbers.prefetch(2),
        lambda numbers: numbers.batch(1).prefetch(2).unbatch(),
        lambda numbers: numbers.shuffle(100),
        lambda numbers: numbers.cache(),
        lambda numbers: numbers.unique(),
        lambda numbers: numbers.scan(0, lambda state, x: (state, x)),
        lambda numbers: numbers.window(2).flat_map(lambda window: window),
        lambda numbers: numbers.group_by_window(int, lambda key, group: group, 2),
    ],
    ids=["prefetch", "batch", "shuffle", "cache", "unique", "scan", "window", "group"],
)
def test_several_errors_in_a_row_are_ignored(
    hold: Callable[[Dataset], Dataset], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(10)))
    text = dx.data.TextLineDataset(str(lines)).map(lambda line: np.int64(line))
    kept = Dataset.range(10).cache()
    list(kept)
    for numbers in (
        Dataset.range(10),
        Dataset.from_generator(lambda: iter(range(10))),
        Dataset.counter().take(10),
        text,
        kept,
    ):
        made = hold(numbers.map(_whole)).ignore_errors()
        assert sorted(int(x) for x in made) == [0, 1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("leave_out", "left"),
    [
        (lambda numbers: numbers.skip(3), [4, 5, 6, 7, 8, 9]),
        (lambda numbers: numbers.shard(3, 2), [3, 6, 9]),
    ],
    ids=["skip", "shard"],
)
def test_an_error_does_not_count_as_an_element_that_is_left_out(
    leave_out: Callable[[Dataset], Dataset], left: list[int]
) -> None:
    def fail_at_one(x: Any) -> Any:
        if x == 1:
            raise ValueError("one")
        return x

    numbers = leave_out(Dataset.range(10).map(fail_at_one)).ignore_errors()
    assert [int(x) for x in numbers] == left

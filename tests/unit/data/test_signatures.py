"""Data types and shapes: what generators are told to yield, and what element_spec finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import Dataset, TensorSpec
from tests.unit.data.reference import values_of

INT = TensorSpec((), np.int64)


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        (1, np.int64, np.int64(1)),
        (0.1, np.float64, np.float64(0.1)),
        (2, "float32", np.float32(2)),
        ([1, 2], np.int8, np.array([1, 2], np.int8)),
        ((1, "a"), (np.uint8, str), (np.uint8(1), b"a")),
        ([1, [2.5]], [np.uint8, np.float32], (np.uint8(1), np.array([2.5], np.float32))),
        ({"a": [0.1]}, {"a": np.float64}, {"a": np.array([0.1])}),
    ],
)
def test_types_alone_convert_what_a_generator_yields(value: Any, types: Any, expected: Any) -> None:
    dataset = Dataset.from_generator(lambda: iter([value]), output_types=types)
    (element,) = dataset
    assert repr(element) == repr(expected)


def test_types_and_shapes_are_a_signature() -> None:
    dataset = Dataset.from_generator(
        lambda: iter([([1, 2], "a")]), [np.int32, str], output_shapes=[[None], []]
    )
    assert dataset.element_spec == (TensorSpec([None], np.int32), TensorSpec((), bytes))
    assert values_of(dataset) == [([1, 2], b"a")]


def test_numbers_keep_their_width_until_the_signature_is_applied() -> None:
    dataset = Dataset.from_generator(
        lambda: iter([(0.1, [2**40])]),
        output_signature=(TensorSpec((), np.float64), TensorSpec([1], np.int64)),
    )
    assert values_of(dataset) == [(0.1, [2**40])]


def test_zero_bytes_at_the_end_of_text_are_kept() -> None:
    assert values_of(Dataset.from_tensor_slices([b"a\0", "b"])) == [b"a\0", b"b"]
    nested = Dataset.range(1).map(lambda x: ([[b"\0\0"], [b""]], 1))
    assert values_of(nested) == [([[b"\0\0"], [b""]], 1)]


def test_file_patterns_may_be_bytes_or_arrays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    pattern = str(tmp_path / "*")
    expected = values_of(Dataset.list_files(pattern, shuffle=False))
    assert len(expected) == 2
    for given in (pattern.encode(), np.array([pattern]), [tmp_path / "b", tmp_path / "a"]):
        assert values_of(Dataset.list_files(given, shuffle=False)) == expected


def test_none_leaves_reshuffling_on() -> None:
    dataset = Dataset.range(50).shuffle(50, seed=1, reshuffle_each_iteration=None)
    assert values_of(dataset) != values_of(dataset)


def test_padding_values_are_converted_where_nothing_is_lost() -> None:
    ragged = Dataset.range(1, 3).map(lambda n: (np.full(n, b"q", object), np.ones(n, np.float32)))
    (batch,) = ragged.padded_batch(2, None, ("z", 2))
    assert batch[0].tolist() == [[b"q", b"z"], [b"q", b"q"]]
    assert batch[1].tolist() == [[1, 2], [1, 1]]
    (nan,) = ragged.map(lambda _, ones: ones).padded_batch(2, [np.int64(2)], np.float64("nan"))
    assert nan.dtype == np.float32 and np.isnan(nan[0, 1])


@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        # Functions that were never called get an element of zeros.
        (Dataset.range(0).flat_map(Dataset.range), INT),
        (Dataset.range(0).interleave(lambda x: Dataset.from_tensors((x, x))), (INT, INT)),
        # Sizes that vary outside vary inside.
        (
            Dataset.range(5).batch(2).flat_map(Dataset.from_tensors),
            TensorSpec([None], np.int64),
        ),
        (
            Dataset.range(0).batch(2).flat_map(Dataset.from_tensors),
            TensorSpec([None], np.int64),
        ),
        # The first element is empty; that does not mean that all are.
        (
            Dataset.from_generator(
                lambda: iter([[], [1]]), output_signature=TensorSpec([None], np.int64)
            ).map(lambda x: x + 1),
            TensorSpec([None], np.int64),
        ),
        (
            Dataset.from_generator(
                lambda: iter([[], ["a"]]), output_signature=TensorSpec([None], str)
            ).map(lambda x: x),
            TensorSpec([None], str),
        ),
        # A function for batches of one size only.
        (Dataset.range(8).batch(4).map(lambda x: x.reshape(2, 2)), TensorSpec([2, 2], np.int64)),
    ],
)
def test_element_spec(dataset: Dataset, spec: Any) -> None:
    assert dataset.element_spec == spec


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (Dataset.from_tensor_slices(np.zeros((4, 3))).unbatch(), 12),
        (Dataset.from_tensors(([1, 2], [3, 4])).repeat(2).unbatch(), 4),
        (Dataset.range(5).batch(2).unbatch(), -2),
        (Dataset.from_tensors(([1, 2], [3])).unbatch(), -2),
        (Dataset.from_tensors([1, 2]).map(lambda x: x).unbatch(), -2),
    ],
)
def test_cardinality_of_unbatch(dataset: Dataset, count: int) -> None:
    assert dataset.cardinality() == count


def test_notes_on_errors_name_the_step_that_was_written() -> None:
    def faulty(x: Any) -> Any:
        raise KeyError(x)

    for step in ("flat_map", "interleave", "map", "filter"):
        with pytest.raises(KeyError) as caught:
            values_of(getattr(Dataset.range(1), step)(faulty))
        assert any(f"Dataset.{step}," in note for note in caught.value.__notes__)

"""The steps of a data set, one by one, with tf.data's results."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    TensorSpec,
)
from tests.unit.data.reference import plain, values_of

Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([5.0, 6.0], np.float32),
        ([1, 2], np.int32),
        ([1, 2**40], np.int64),
        ([True, False], np.bool_),
        ([1, 2.5], np.float32),
        (np.array([1.0, 2.0]), np.float64),
        (np.array([1, 2], np.uint8), np.uint8),
        ([np.float64(1.0), np.float64(2.0)], np.float64),
        ([np.zeros(3), np.ones(3)], np.float64),
        (["a", "b"], object),
        (np.array(["a", "b"]), object),
    ],
)
def test_from_tensor_slices_has_tensorflows_dtypes(value: Any, dtype: Any) -> None:
    dataset = Dataset.from_tensor_slices(value)
    assert dataset.element_spec.dtype == np.dtype(dtype)
    (batch,) = dataset.batch(2)
    assert batch.dtype == np.dtype(dtype)
    assert len(batch) == 2


def test_range_counts_in_int64() -> None:
    assert Dataset.range(3).element_spec == TensorSpec((), np.int64)
    assert values_of(Dataset.range(2, 9, 3)) == [2, 5, 8]
    assert values_of(Dataset.range(9, 0, -4)) == [9, 5, 1]
    assert values_of(Dataset.range(9, 0, -4).skip(1).batch(5)) == [[5, 1]]
    (first,) = Dataset.range(1, output_type=np.int32)
    assert type(first) is np.int32


def test_text_becomes_bytes() -> None:
    assert values_of(Dataset.from_tensors("ä")) == ["ä".encode()]
    assert values_of(Dataset.from_tensors(np.str_("b"))) == [b"b"]
    (batch,) = Dataset.from_tensor_slices(["a", "bc"]).batch(2)
    assert batch.dtype == object
    assert batch.tolist() == [b"a", b"bc"]


def test_nests_keep_their_structure() -> None:
    nest = {"point": Point([1, 2], [3, 4]), "pair": ([5, 6], [7, 8])}
    dataset = Dataset.from_tensor_slices(nest)
    first, _ = dataset
    assert isinstance(first["point"], Point)
    assert plain(first)["pair"] == (5, 7)
    (batch,) = dataset.batch(2)
    assert isinstance(batch["point"], Point)
    assert batch["point"].x.tolist() == [1, 2]
    (stacked,) = dataset.map(lambda e: e).batch(2)
    assert plain(stacked["point"].y) == [3, 4]
    assert dataset.element_spec["point"].x == TensorSpec((), np.int32)


def test_source_arrays_cannot_be_changed_through_elements() -> None:
    array = np.arange(6.0).reshape(3, 2)
    first = next(iter(Dataset.from_tensor_slices(array)))
    with pytest.raises(ValueError, match="read-only"):
        first += 1
    assert array[0].tolist() == [0.0, 1.0]
    array[1] = 9  # The user's own array stays writable.


def test_from_tensors_is_one_element() -> None:
    assert values_of(Dataset.from_tensors(([1, 2], 3.5))) == [([1, 2], 3.5)]
    assert values_of(Dataset.from_tensors([[1.0]]).repeat(3).batch(2)) == [
        [[[1.0]], [[1.0]]],
        [[[1.0]]],
    ]


def test_map_unpacks_tuples_but_not_named_tuples() -> None:
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3, 6))
    assert values_of(pairs.map(lambda a, b: a + b)) == [3, 5, 7]
    points = pairs.map(lambda a, b: Point(a, b))
    assert values_of(points.map(lambda p: p.x * p.y)) == [0, 4, 10]


def test_map_results_follow_tensorflows_conventions() -> None:
    one = Dataset.range(1)
    (element,) = one.map(lambda x: [x, 1, 2.5])
    assert isinstance(element, tuple)
    assert [type(part) for part in element] == [np.int64, np.int32, np.float32]
    (element,) = one.map(lambda x: ({"a": [1, 2]}, "t"))
    assert element[0]["a"].dtype == np.int32
    assert element[1] == b"t"


def test_map_with_jax_arrays_gives_numpy() -> None:
    jnp = pytest.importorskip("jax.numpy")
    (element,) = Dataset.range(1).map(lambda x: jnp.zeros(2, jnp.bfloat16))
    assert isinstance(element, np.ndarray)
    assert element.dtype == jnp.bfloat16


def test_filter_sees_tuples_as_arguments() -> None:
    pairs = Dataset.range(6).map(lambda x: (x, x % 2))
    assert values_of(pairs.filter(lambda x, odd: odd == 1)) == [(1, 1), (3, 1), (5, 1)]
    assert values_of(Dataset.range(3).filter(lambda x: np.array(x > 0))) == [1, 2]


def test_interleave_has_tensorflows_order() -> None:
    def inner(x: Any) -> Dataset:
        return Dataset.range(x * 10, x * 10 + x + 1)

    expected = [0, 10, 11, 20, 21, 30, 31, 22, 32, 33, 40, 41, 42, 43, 44]
    for threads in (None, 3, AUTOTUNE):
        dataset = Dataset.range(5).interleave(inner, 3, 2, num_parallel_calls=threads)
        assert values_of(dataset) == expected
    assert values_of(Dataset.range(3).flat_map(inner)) == [0, 10, 11, 20, 21, 22]
    assert values_of(Dataset.range(2).interleave(inner)) == [0, 10, 11]


def test_batches_of_the_seeds() -> None:
    assert values_of(Dataset.range(10).batch(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert values_of(Dataset.range(10).batch(4, drop_remainder=True)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert values_of(Dataset.range(8).batch(4).unbatch().batch(2)) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert values_of(Dataset.range(5).batch(2).batch(2, drop_remainder=True)) == [[[0, 1], [2, 3]]]


def test_shuffle_before_and_after_batch_differ() -> None:
    after = values_of(Dataset.range(20).batch(2).shuffle(10, seed=1))
    assert sorted(after) == values_of(Dataset.range(20).batch(2))
    before = values_of(Dataset.range(20).shuffle(20, seed=1).batch(2))
    assert any(b != a + 1 for a, b in before)
    assert sorted(number for pair in before for number in pair) == list(range(20))


def test_padded_batch_pads_to_the_largest_or_as_told() -> None:
    ragged = Dataset.range(1, 5).map(lambda n: np.full(n, n))
    assert values_of(ragged.padded_batch(2)) == [
        [[1, 0], [2, 2]],
        [[3, 3, 3, 0], [4, 4, 4, 4]],
    ]
    assert values_of(ragged.padded_batch(3, [5], -1, drop_remainder=True)) == [
        [[1, -1, -1, -1, -1], [2, 2, -1, -1, -1], [3, 3, 3, -1, -1]]
    ]
    nested = ragged.map(lambda x: (x, {"n": x[0], "t": ["t"] * int(x[0])}))
    (batch,) = nested.padded_batch(4, ((None,), {"n": (), "t": [-1]}), (0, {"n": 0, "t": b"-"}))
    assert batch[0].shape == (4, 4)
    assert batch[1]["n"].tolist() == [1, 2, 3, 4]
    assert batch[1]["t"][0].tolist() == [b"t", b"-", b"-", b"-"]
    points = ragged.map(lambda x: Point(x, x[0]))
    (batch,) = points.padded_batch(4, Point([None], []))
    assert batch.y.tolist() == [1, 2, 3, 4]
    assert ragged.padded_batch(2).element_spec == TensorSpec((None, None), np.int64)
    assert ragged.padded_batch(2, [5], drop_remainder=True).element_spec.shape == (2, 5)


def test_take_skip_shard_repeat_at_their_edges() -> None:
    dataset = Dataset.range(5)
    assert values_of(dataset.take(-1)) == [0, 1, 2, 3, 4]
    assert values_of(dataset.take(0)) == []
    assert values_of(dataset.take(9)) == [0, 1, 2, 3, 4]
    assert values_of(dataset.skip(-1)) == []
    assert values_of(dataset.skip(7)) == []
    assert values_of(dataset.shard(3, 1)) == [1, 4]
    assert values_of(dataset.filter(lambda x: True).shard(3, 2)) == [2]
    assert values_of(dataset.repeat(0)) == []
    assert values_of(dataset.filter(lambda x: True).repeat(0)) == []
    assert values_of(dataset.repeat().take(7)) == [0, 1, 2, 3, 4, 0, 1]
    assert values_of(dataset.repeat(-3).take(7)) == [0, 1, 2, 3, 4, 0, 1]
    assert values_of(dataset.take(0).repeat()) == []
    assert values_of(dataset.filter(lambda x: False).repeat()) == []


def test_batches_run_on_across_repetitions() -> None:
    for source in (Dataset.range(3), Dataset.range(3).filter(lambda x: True)):
        assert values_of(source.repeat(3).batch(4)) == [[0, 1, 2, 0], [1, 2, 0, 1], [2]]
        assert values_of(source.batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]


def test_enumerate_zip_and_concatenate() -> None:
    letters = Dataset.from_tensor_slices(["a", "b"])
    assert values_of(letters.enumerate(start=5)) == [(5, b"a"), (6, b"b")]
    assert values_of(Dataset.zip((letters, Dataset.range(9)))) == [(b"a", 0), (b"b", 1)]
    assert values_of(Dataset.zip({"l": letters, "n": (letters,)})) == [
        {"l": b"a", "n": (b"a",)},
        {"l": b"b", "n": (b"b",)},
    ]
    assert values_of(Dataset.zip([letters, letters])) == [(b"a", b"a"), (b"b", b"b")]
    assert values_of(Dataset.zip(datasets=(letters, letters)).take(1)) == [(b"a", b"a")]
    assert values_of(letters.concatenate(letters)) == [b"a", b"b", b"a", b"b"]


def test_list_files_are_sorted_then_shuffled(tmp_path: Path) -> None:
    names = [tmp_path / f"{i}.txt" for i in range(9)]
    for name in names:
        name.write_text("x")
    expected = [str(name).encode() for name in names]
    assert values_of(Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)) == expected
    some = Dataset.list_files([tmp_path / "0*", tmp_path / "1*"], shuffle=False)
    assert values_of(some) == expected[:2]
    shuffled = values_of(Dataset.list_files(str(tmp_path / "*.txt"), seed=1))
    assert sorted(shuffled) == expected
    assert shuffled != expected


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (Dataset.range(10), 10),
        (Dataset.range(10).batch(3), 4),
        (Dataset.range(10).batch(3, drop_remainder=True), 3),
        (Dataset.range(10).padded_batch(3), 4),
        (Dataset.range(10).batch(3).unbatch(), UNKNOWN_CARDINALITY),
        (Dataset.range(12).batch(3, drop_remainder=True).unbatch(), 12),
        (Dataset.range(10).shard(3, 1), 3),
        (Dataset.range(2).shard(3, 2), 0),
        (Dataset.range(10).repeat(), INFINITE_CARDINALITY),
        (Dataset.range(10).repeat(3), 30),
        (Dataset.range(10).repeat().repeat(3), INFINITE_CARDINALITY),
        (Dataset.range(0).repeat(), 0),
        (Dataset.range(10).repeat().take(4), 4),
        (Dataset.range(10).repeat().skip(4), INFINITE_CARDINALITY),
        (Dataset.range(10).take(20).skip(3), 7),
        (Dataset.range(10).filter(lambda x: True), UNKNOWN_CARDINALITY),
        (Dataset.range(10).filter(lambda x: True).take(3), UNKNOWN_CARDINALITY),
        (Dataset.range(0).filter(lambda x: True), UNKNOWN_CARDINALITY),
        (Dataset.range(10).flat_map(lambda x: Dataset.range(2)), UNKNOWN_CARDINALITY),
        (Dataset.range(10).shuffle(2).prefetch(1).cache().enumerate(), 10),
        (Dataset.range(10).concatenate(Dataset.range(5)), 15),
        (Dataset.range(10).concatenate(Dataset.range(5).repeat()), INFINITE_CARDINALITY),
        (Dataset.range(3).concatenate(Dataset.range(5).filter(bool)), UNKNOWN_CARDINALITY),
        (Dataset.zip(Dataset.range(3), Dataset.range(5).repeat()), 3),
        (Dataset.zip(Dataset.range(3).repeat(), Dataset.range(5).repeat()), INFINITE_CARDINALITY),
        (Dataset.zip(Dataset.range(3), Dataset.range(5).filter(bool)), UNKNOWN_CARDINALITY),
        (Dataset.from_tensors(1), 1),
        (Dataset.from_generator(lambda: [1]), UNKNOWN_CARDINALITY),
    ],
)
def test_cardinality(dataset: Dataset, count: int) -> None:
    assert dataset.cardinality() == count
    if count >= 0:
        assert len(dataset) == count
    assert bool(dataset)


def test_element_spec_of_every_kind_of_step() -> None:
    rows = Dataset.from_tensor_slices(np.zeros((6, 3), np.float32))
    assert rows.element_spec == TensorSpec([3], np.float32)
    assert rows.batch(4).element_spec == TensorSpec([None, 3], np.float32)
    assert rows.batch(2, drop_remainder=True).element_spec.shape == (2, 3)
    assert rows.batch(4).unbatch().element_spec.shape == (3,)
    # What varies with the batch is found by running the function on another size.
    mapped = rows.batch(4).map(lambda x: (x.T, x.sum(0), x.astype(np.float64)))
    assert mapped.element_spec == (
        TensorSpec([3, None], np.float32),
        TensorSpec([3], np.float32),
        TensorSpec([None, 3], np.float64),
    )
    assert rows.batch(1).map(lambda x: x * 2).element_spec.shape == (None, 3)
    assert rows.enumerate().element_spec[0] == TensorSpec((), np.int64)
    assert rows.take(0).map(lambda x: x[:2]).element_spec.shape == (2,)
    text = Dataset.from_tensor_slices(["a"]).take(0).batch(2)
    assert text.map(lambda x: x).element_spec == TensorSpec([None], bytes)
    both = rows.batch(2).concatenate(rows.batch(3, drop_remainder=True))
    assert both.element_spec.shape == (None, 3)
    inner = Dataset.range(3).flat_map(lambda x: Dataset.from_tensors(np.zeros(5)))
    assert inner.element_spec == TensorSpec([5], np.float64)
    zipped = Dataset.zip({"a": rows, "b": Dataset.range(3)})
    assert zipped.element_spec["b"] == TensorSpec((), np.int64)
    assert rows.cache().prefetch(1).shuffle(3).repeat().element_spec.shape == (3,)
    assert Dataset.from_generator(lambda: iter([(1, 2.5)])).element_spec == (
        TensorSpec((), np.int32),
        TensorSpec((), np.float32),
    )


def test_specs_tell_what_fits() -> None:
    spec = TensorSpec([None, 3], np.float32)
    assert spec.is_compatible_with(np.zeros((7, 3), np.float32))
    assert spec.is_compatible_with(TensorSpec([4, 3], np.float32))
    assert not spec.is_compatible_with(np.zeros((7, 4), np.float32))
    assert not spec.is_compatible_with(np.zeros(3, np.float32))
    assert not spec.is_compatible_with(np.zeros((7, 3)))
    assert TensorSpec([-1]) == TensorSpec([None], np.float32)


def test_generators_are_called_anew_and_fit_their_signature() -> None:
    def numbers(stop: int) -> Any:
        for i in range(stop):
            yield i, [float(i)] * i

    signature = (TensorSpec((), np.int64), TensorSpec([None], np.float32))
    dataset = Dataset.from_generator(numbers, args=(3,), output_signature=signature)
    assert dataset.element_spec == signature
    for _ in range(2):
        assert values_of(dataset) == [(0, []), (1, [1.0]), (2, [2.0, 2.0])]
    (_, (number, _), _) = dataset
    assert number.dtype == np.int64
    lists = Dataset.from_generator(lambda: iter([[1, 2.0]]), output_signature=signature[:1] * 2)
    assert values_of(lists) == [(1, 2)]
    older = Dataset.from_generator(numbers, (np.int64, np.float32), ((), (None,)), args=(2,))
    assert older.element_spec == signature
    assert values_of(Dataset.from_generator(lambda: [1, 2], np.int64)) == [1, 2]
    text = Dataset.from_generator(lambda: ["a"], output_signature=TensorSpec((), str))
    assert values_of(text) == [b"a"]


def test_apply_and_repr() -> None:
    assert list(Dataset.range(2).as_numpy_iterator()) == [0, 1]
    assert values_of(Dataset.range(3).apply(lambda d: d.batch(2))) == [[0, 1], [2]]
    assert repr(Dataset.range(3).batch(2)) == "<Dataset batch(2)>"
    assert repr(Dataset.range(3).prefetch(2)) == "<Dataset prefetch>"


def test_is_batched_and_static_batch_size() -> None:
    dataset = Dataset.range(8)
    assert dataset.is_batched is False
    assert dataset.batch(4).map(lambda x: x).prefetch(1).is_batched is True
    assert dataset.batch(4).repeat().shuffle(2).static_batch_size == 4
    assert dataset.batch(4).unbatch().is_batched is False
    assert dataset.batch(4).unbatch().static_batch_size is None
    assert dataset.batch(4).enumerate().is_batched is False
    assert Dataset.from_generator(lambda: [[1]]).is_batched is None
    flat = dataset.flat_map(lambda x: Dataset.range(x).batch(3))
    assert (flat.is_batched, flat.static_batch_size) == (True, 3)
    empty = dataset.take(0).flat_map(lambda x: Dataset.range(x).batch(3))
    assert (empty.is_batched, empty.static_batch_size) == (None, None)
    assert Dataset.zip(dataset.batch(2), dataset).is_batched is False
    generator = Dataset.from_generator(lambda: [[1]])
    assert Dataset.zip(dataset.batch(2), generator).is_batched is None
    both = dataset.batch(2).concatenate(dataset.batch(3))
    assert (both.is_batched, both.static_batch_size) == (True, None)
    assert Dataset.zip(dataset.batch(2), dataset.batch(2)).static_batch_size == 2

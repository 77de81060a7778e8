"""What a user can do wrong with a data set, and that the message says what and how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distribax.data import Dataset, TensorSpec, as_dataset
from distribax.data.experimental import SHARD_HINT
from tests.unit.data.reference import values_of

D = Dataset
FIVE = Dataset.range(5)
RAGGED = Dataset.range(1, 4).map(lambda n: np.zeros(n))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: D.from_tensor_slices(3), ValueError, "without rows"),
        (lambda: D.from_tensor_slices(([1, 2], [3])), ValueError, "different numbers of rows"),
        (lambda: D.from_tensor_slices({"a": None}), TypeError, "None of type NoneType"),
        (lambda: D.from_tensor_slices({1, 2}), TypeError, "type set"),
        (lambda: D.from_tensor_slices([[1], [2, 3]]), ValueError, "differ in shape"),
        (lambda: D.from_tensor_slices([object()]), TypeError, "type object"),
        (lambda: D.from_tensors(object()), TypeError, "type object"),
        (lambda: D.from_generator([1]), TypeError, r"generator=\[1\] .* not a function"),
        (
            lambda: D.from_generator(list, np.int32, output_signature=TensorSpec()),
            ValueError,
            "both given",
        ),
        (lambda: D.range("3"), TypeError, "range='3' of type str is not a whole number"),
        (lambda: D.range(), TypeError, "1 to 3 whole numbers, but 0"),
        (lambda: D.range(0, 5, 0), ValueError, "step of 0"),
        (lambda: D.list_files("no/such/file*"), ValueError, "matches no file"),
        (lambda: D.zip(FIVE, 3), TypeError, "zip was given 3 of type int"),
        (lambda: D.zip(), ValueError, "no data set"),
        (lambda: FIVE.map(3), TypeError, "map_func=3"),
        (lambda: FIVE.map(abs, 0), ValueError, "num_parallel_calls=0"),
        (lambda: FIVE.filter(None), TypeError, "predicate=None"),
        (lambda: FIVE.interleave(abs, cycle_length=0), ValueError, "cycle_length=0"),
        (lambda: FIVE.batch(0), ValueError, "batch_size=0 is too small"),
        (lambda: FIVE.batch(2.5), TypeError, "batch_size=2.5"),
        (lambda: FIVE.padded_batch(2, "abc"), TypeError, "padded_shapes='abc'"),
        (lambda: FIVE.shard(0, 0), ValueError, "num_shards=0"),
        (lambda: FIVE.shard(3, 3), ValueError, "index=3 is outside 0 to 2"),
        (lambda: FIVE.shuffle(0), ValueError, "buffer_size=0 is too small"),
        (lambda: FIVE.prefetch(-5), ValueError, "buffer_size=-5"),
        (lambda: FIVE.concatenate([1]), TypeError, r"dataset=\[1\] of type list"),
        (lambda: FIVE.with_options({}), TypeError, "options={} of type dict"),
        (lambda: len(FIVE.repeat()), TypeError, "infinite"),
        (lambda: len(FIVE.filter(bool)), TypeError, "unknown"),
        (lambda: TensorSpec([-3]), ValueError, r"shape=\[-3\]"),
        (lambda: TensorSpec(3), TypeError, "shape=3 is not a shape"),
        (lambda: TensorSpec((2.5,)), TypeError, r"shape=\(2.5,\) is not a shape"),
        (lambda: TensorSpec((), "nonsense"), TypeError, "dtype='nonsense' is not a data type"),
        (lambda: D.from_tensor_slices({}), ValueError, "tensors={} has no component"),
        (lambda: D.from_tensor_slices(["a", 1]), TypeError, "1 of type int"),
        (lambda: D.range(3, output_type=7), TypeError, "output_type=7 is not a data type"),
        (lambda: D.list_files(3), TypeError, "file_pattern=3 of type int"),
        (lambda: D.list_files(__file__, "no"), TypeError, "shuffle='no' of type str"),
        (lambda: D.zip(FIVE, datasets=FIVE), TypeError, "both as arguments and as datasets"),
        (lambda: FIVE.batch(True), TypeError, "batch_size=True of type bool"),
        (lambda: FIVE.batch(2, "no"), TypeError, "drop_remainder='no' of type str"),
        (lambda: FIVE.padded_batch(2, [-7]), ValueError, r"padded_shapes=\[-7\] has a negative"),
        (lambda: FIVE.shuffle(3, 1, "no"), TypeError, "reshuffle_each_iteration='no'"),
        (lambda: FIVE.cache(3), TypeError, "filename=3 of type int"),
        (lambda: FIVE.apply(3), TypeError, "transformation_func=3"),
        (lambda: D.from_generator(list, args=3), TypeError, "args=3 is not a tuple"),
        (lambda: D.from_generator(list, output_signature=int), TypeError, "output_signature=<"),
        (lambda: D.from_generator(list, output_types="abc"), TypeError, "output_types='abc'"),
        (lambda: D.from_generator(list, int, "abc"), TypeError, "output_shapes='abc'"),
        (lambda: D.from_generator(list, None, ()), ValueError, "without output_types"),
        (lambda: as_dataset("text"), TypeError, "'text' of type str"),
        (lambda: iter(FIVE).set_state({"version": 1}), ValueError, "not a position"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (FIVE.map(lambda x: None), TypeError, "None of type NoneType"),
        (FIVE.map(lambda x: len), TypeError, "builtin_function"),
        (FIVE.filter(lambda x: x), ValueError, "Expected one bool"),
        (FIVE.filter(lambda x: np.array([True])), ValueError, "Expected one bool"),
        (FIVE.flat_map(lambda x: [x]), TypeError, "Expected a Dataset"),
        (FIVE.unbatch(), ValueError, "no batch dimension"),
        (D.from_tensors(()).unbatch(), ValueError, "empty nest"),
        (D.from_tensors(([1], [1, 2])).unbatch(), ValueError, "differ in their first dimension"),
        (FIVE.shard(SHARD_HINT, SHARD_HINT), ValueError, "AutoShardPolicy.HINT"),
        (RAGGED.batch(3), ValueError, r"element 0 .* \[1\], element 1 .* \[2\]"),
        (FIVE.map(lambda x: x * (0.5 if x else 1)).batch(5), TypeError, "different dtypes"),
        (FIVE.map(lambda x: (x,) * (1 + x)).batch(5), ValueError, "different structures"),
        (FIVE.map(lambda x: {str(x): x}).batch(5), ValueError, "different structures"),
        (RAGGED.padded_batch(3, [2]), ValueError, "padded_shapes says 2 in dimension 0"),
        (RAGGED.padded_batch(3, [2, 2]), ValueError, "pad to 2 dimensions"),
        (FIVE.map(lambda x: next(iter(()))), RuntimeError, "raised StopIteration"),
        (FIVE.map(lambda x: x if x else b"text").batch(5), TypeError, "different dtypes"),
        (D.from_generator(lambda: 3), TypeError, "returned 3 of type int"),
        (RAGGED.padded_batch(3, {"a": [None]}), ValueError, "padded_shapes=.* another structure"),
        (FIVE.map(lambda x: {"a": x}).padded_batch(3, ()), ValueError, "another structure"),
        (RAGGED.padded_batch(3, None, (1,)), ValueError, "padding_values=.* another structure"),
        (FIVE.padded_batch(3, None, 0.5), TypeError, "padding_values has 0.5 .* dtype int64"),
        (RAGGED.padded_batch(3, None, "text"), TypeError, "padding_values has 'text'"),
    ],
)
def test_errors_while_iterating(dataset: Dataset, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        values_of(dataset)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (2.5, TypeError, "2.5 of dtype float64 .* without loss"),
        (2**40, TypeError, "without loss"),
        (np.int64(2**40), TypeError, "without loss"),
        ([1, 2], ValueError, "does not fit"),
        ("text", ValueError, "does not fit"),
        (["text"], ValueError, "does not fit"),
        ({"a": 1}, ValueError, "does not fit"),
    ],
)
def test_generators_that_break_their_signature(
    value: Any, error: type[Exception], message: str
) -> None:
    signature = TensorSpec((), np.int32)
    dataset = Dataset.from_generator(lambda: iter([value]), output_signature=signature)
    with pytest.raises(error, match=message):
        values_of(dataset)


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Dataset.from_generator(lambda: iter(())), ValueError, "output_signature"),
        (FIVE.take(0).flat_map(lambda x: D.range(1 // x)), ValueError, "flat_map over an empty"),
        (FIVE.unbatch(), ValueError, "unbatch needs"),
        (FIVE.concatenate(FIVE.map(np.float32)), TypeError, "different types"),
        (FIVE.concatenate(FIVE.map(lambda x: (x, x))), TypeError, "different structures"),
        (as_dataset(iter([np.zeros(2)])), ValueError, "iterated only once"),
        (as_dataset(iter([np.zeros(2)])).map(abs), ValueError, "iterated only once"),
    ],
)
def test_specs_that_cannot_be_known(dataset: Dataset, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _ = dataset.element_spec


def test_errors_of_user_functions_keep_their_traceback_and_name_the_function() -> None:
    def faulty(x: Any) -> Any:
        return 1 // (int(x) - 3)

    for threads, prefetch in ((None, 0), (2, 0), (None, 2), (2, 2)):
        dataset = FIVE.map(faulty, threads).prefetch(prefetch)
        with dataset.make_iterator() as iterator:
            assert [int(next(iterator)) for _ in range(3)] == [-1, -1, -1]
            with pytest.raises(ZeroDivisionError) as caught:
                next(iterator)
        names = [entry.name for entry in caught.traceback]
        assert "faulty" in names
        assert any("faulty" in note and "Dataset.map" in note for note in caught.value.__notes__)


def test_errors_about_what_a_function_returns_name_it() -> None:
    def forgetful(x: Any) -> None: ...

    with pytest.raises(TypeError, match="None of type NoneType") as caught:
        list(FIVE.map(forgetful))
    assert any("forgetful" in note and "returned" in note for note in caught.value.__notes__)


def test_iteration_can_go_on_after_an_error() -> None:
    def faulty(x: Any) -> Any:
        if x in (1, 3):
            raise KeyError("odd")
        return x

    for threads in (None, 2):
        for dataset in (
            Dataset.range(6).map(faulty, threads),
            Dataset.range(6).map(faulty).map(lambda x: x, threads),
        ):
            seen: list[Any] = []
            with dataset.make_iterator() as iterator:
                while True:
                    try:
                        seen.append(int(next(iterator)))
                    except KeyError:
                        seen.append("error")
                    except StopIteration:
                        break
            assert seen == [0, "error", 2, "error", 4, 5]


def test_a_shuffle_loses_nothing_but_the_faulty_elements() -> None:
    def faulty(x: Any) -> Any:
        if x in (1, 7):
            raise KeyError("odd")
        return x

    seen: list[Any] = []
    with Dataset.range(9).map(faulty).shuffle(4).make_iterator() as iterator:
        while True:
            try:
                seen.append(int(next(iterator)))
            except KeyError:
                seen.append(-1)
            except StopIteration:
                break
    assert sorted(seen) == [-1, -1, 0, 2, 3, 4, 5, 6, 8]

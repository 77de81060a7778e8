"""Steps of tf.data: elements and order as TensorFlow 2.21 has them, positions through each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.data import Dataset, as_dataset
from distribax.data.element_spec import DatasetSpec
from distribax.data.rewrites import auto_shard

ROWS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


def _ragged(D: Any) -> Any:
    return D.from_generator(lambda: iter(ROWS), np.int64, output_shapes=[None])


def _buckets(**options: Any) -> Callable[[Any], Any]:
    boundaries = options.pop("boundaries", [3, 5])
    return lambda D: _ragged(D).bucket_by_sequence_length(
        lambda row: row.shape[0] if isinstance(row, np.ndarray) else _size(row),
        boundaries,
        [2, 2, 2],
        **options,
    )


def _size(row: Any) -> Any:
    import tensorflow as tf

    return tf.shape(row)[0]


def _choose(stop: bool) -> Callable[[Any], Any]:
    choice = np.array([0, 1, 0, 2, 1, 1, 0, 2, 2], np.int64)
    return lambda D: D.choose_from_datasets(
        [D.range(2), D.range(10, 14), D.range(20, 23)],
        D.from_tensor_slices(choice),
        stop_on_empty_dataset=stop,
    )


CASES: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "window": (lambda D: D.range(7).window(3), [[0, 1, 2], [3, 4, 5], [6]]),
    "window drop": (
        lambda D: D.range(7).window(3, drop_remainder=True),
        [[0, 1, 2], [3, 4, 5]],
    ),
    "window shift": (
        lambda D: D.range(5).window(3, shift=1),
        [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4], [4]],
    ),
    "window gap": (lambda D: D.range(7).window(2, shift=3), [[0, 1], [3, 4], [6]]),
    "window stride": (lambda D: D.range(7).window(3, stride=2), [[0, 2, 4], [3, 5], [6]]),
    "window all": (
        lambda D: D.range(7).window(3, 2, 2, drop_remainder=True),
        [[0, 2, 4], [2, 4, 6]],
    ),
    "window nest": (
        lambda D: D.zip((D.range(4), D.range(4, 8))).window(2),
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]],
    ),
    "window flat": (
        lambda D: D.range(5).window(3, 1, drop_remainder=True).flat_map(lambda w: w.batch(3)),
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]],
    ),
    "scan": (lambda D: D.range(5).scan(np.int64(0), lambda s, x: (s + x, s + x)), [0, 1, 3, 6, 10]),
    "take_while": (lambda D: D.range(10).take_while(lambda x: x % 4 < 3), [0, 1, 2]),
    "rebatch": (lambda D: D.range(7).batch(4).rebatch(3), [[0, 1, 2], [3, 4, 5], [6]]),
    "rebatch drop": (lambda D: D.range(7).batch(4).rebatch(3, True), [[0, 1, 2], [3, 4, 5]]),
    "rebatch turns": (
        lambda D: D.range(7).batch(4).rebatch([2, 1]),
        [[0, 1], [2], [3, 4], [5], [6]],
    ),
    "rebatch turns drop": (
        lambda D: D.range(7).batch(4).rebatch([2, 1], True),
        [[0, 1], [2], [3, 4], [5]],
    ),
    "rebatch all": (lambda D: D.range(7).batch(4).rebatch(20), [[0, 1, 2, 3, 4, 5, 6]]),
    "choose": (_choose(True), [0, 10, 1, 20, 11, 12]),
    "choose on": (_choose(False), [0, 10, 1, 20, 11, 12, 21, 22]),
    "sample": (
        lambda D: D.sample_from_datasets([D.range(3), D.range(9)], [1.0, 0.0], seed=1),
        [0, 1, 2],
    ),
    "counter": (lambda D: D.counter(5, -2).take(3), [5, 3, 1]),
    "unique": (lambda D: D.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique(), [1, 37, 2]),
    "unique text": (lambda D: D.from_tensor_slices(["a", "b", "a"]).unique(), [b"a", b"b"]),
    "group": (
        lambda D: D.range(11).group_by_window(lambda x: 2 - x % 3, lambda k, d: d.batch(2), 2),
        [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8]],
    ),
    "group sizes": (
        lambda D: D.range(7).group_by_window(
            lambda x: x % 3,
            lambda k, d: d.map(lambda x: (k, x)),
            window_size_func=lambda k: k + 1,
        ),
        [[0, 0], [0, 3], [1, 1], [1, 4], [0, 6], [2, 2], [2, 5]],
    ),
    "bucket": (
        _buckets(),
        [
            [[1, 2, 3, 4], [5, 6, 7, 0]],
            [[7, 8, 9, 10, 11, 0], [13, 14, 15, 16, 19, 20]],
            [[0, 0], [21, 22]],
        ],
    ),
    "bucket boundary": (
        _buckets(boundaries=[4, 7], pad_to_bucket_boundary=True, padding_values=np.int64(-1)),
        [
            [[0, -1, -1], [5, 6, 7]],
            [[1, 2, 3, 4, -1, -1], [7, 8, 9, 10, 11, -1]],
            [[21, 22, -1]],
            [[13, 14, 15, 16, 19, 20]],
        ],
    ),
    "bucket drop": (
        _buckets(boundaries=[4, 7], drop_remainder=True),
        [[[0, 0, 0], [5, 6, 7]], [[1, 2, 3, 4, 0], [7, 8, 9, 10, 11]]],
    ),
    "enumerate": (lambda D: D.range(2).enumerate(3), [[3, 0], [4, 1]]),
}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        return value
    if hasattr(value, "cardinality"):
        return [_plain(element) for element in value]
    return np.asarray(value).tolist()


@pytest.mark.parametrize("name", CASES)
def test_elements_are_those_of_tf_data(name: str) -> None:
    make, expected = CASES[name]
    dataset = make(Dataset)
    assert [_plain(element) for element in dataset] == expected
    count = dataset.cardinality()
    assert count == len(expected) or count == dx.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize("name", CASES)
def test_positions_are_saved_through_each_step(name: str) -> None:
    make, expected = CASES[name]
    for place in range(len(expected) + 1):
        iterator = make(Dataset).make_iterator()
        for _ in range(place):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        resumed = make(Dataset).make_iterator()
        resumed.set_state(state)
        assert [_plain(element) for element in resumed] == expected[place:], place
        assert [_plain(element) for element in iterator] == expected[place:]


@pytest.mark.parametrize("name", CASES)
def test_recorded_elements_are_tensorflows(name: str) -> None:
    tf = pytest.importorskip("tensorflow")
    make, expected = CASES[name]
    found = [_plain_tf(element) for element in make(tf.data.Dataset)]
    assert found == expected


def _plain_tf(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain_tf(part) for part in value]
    if hasattr(value, "cardinality"):
        return [_plain_tf(element) for element in value]
    array = value.numpy()
    return array if isinstance(array, bytes) else array.tolist()


def test_reduce_and_single_elements() -> None:
    assert Dataset.range(5).reduce(np.int64(0), lambda s, x: s + x) == 10
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3))
    both = pairs.reduce((np.int64(0), np.int64(10)), lambda s, x: (s[0] + x[0], s[1] - x[1]))
    assert both == (3, 7)
    with pytest.raises(TypeError, match="reduce_func returned the state"):
        Dataset.range(3).reduce((0, 0), lambda s, x: s[0])
    assert Dataset.range(1).get_single_element() == 0
    for count in (0, 2):
        with pytest.raises(ValueError, match="get_single_element: the data set has"):
            Dataset.range(count).get_single_element()


def test_random_steps_repeat_by_seed() -> None:
    def sample(**options: Any) -> Dataset:
        parts = [Dataset.range(200), Dataset.range(1000, 1200)]
        return Dataset.sample_from_datasets(parts, **options)

    for make in (
        lambda again: Dataset.random(4, again).take(600),
        lambda again: sample(seed=4, rerandomize_each_iteration=again),
    ):
        for again in (None, True, False):
            one, other = make(again), make(again)
            orders = [[int(x) for x in one] for _ in range(2)]
            assert (orders[0] != orders[1]) == bool(again)
            assert orders == [[int(x) for x in other] for _ in range(2)]
            iterator = one.make_iterator()
            for _ in range(300):
                next(iterator)
            state, rest = iterator.get_state(), [int(x) for x in iterator]
            other.make_iterator().set_state(state)
            iterator.set_state(state)
            assert [int(x) for x in iterator] == rest
    assert sorted(int(x) for x in sample(weights=[0.9, 0.1])) == [*range(200), *range(1000, 1200)]
    weights = Dataset.from_tensors(np.array([1.0, 0.0])).repeat(5)
    assert [int(x) for x in sample(weights=weights)] == [0, 1, 2, 3, 4]
    drawn = [int(x) >= 1000 for x in sample(weights=[0.8, 0.2], stop_on_empty_dataset=True)]
    assert 0.05 < np.mean(drawn) < 0.35
    with pytest.raises(ValueError, match=r"weights=.* does not fit 2 data sets"):
        sample(weights=[1.0])


def test_rejection_resample_reaches_the_shares() -> None:
    classes = Dataset.range(2000).map(lambda x: np.int32(x % 4 == 0))
    for initial in (None, [0.75, 0.25]):
        made = classes.rejection_resample(lambda x: x, [0.5, 0.5], initial, seed=1)
        labels = [int(label) for label, element in made]
        assert 0.45 < np.mean(labels) < 0.55
        assert len(labels) > 900
        iterator = made.make_iterator()
        next(iterator)
        state, following = iterator.get_state(), next(iterator)
        iterator.set_state(state)
        assert next(iterator) == following
    assert [spec.shape for spec in made.element_spec] == [(), ()]
    for shares in ([], [-1.0, 2.0], [0.0], [[1.0]]):
        with pytest.raises(ValueError, match=r"target_dist=.* is not a distribution"):
            classes.rejection_resample(lambda x: x, shares)
    with pytest.raises(ValueError, match="initial_dist has 1 classes"):
        classes.rejection_resample(lambda x: x, [0.5, 0.5], [1.0])
    with pytest.raises(ValueError, match="class_func returned 7"):
        list(classes.rejection_resample(lambda x: 7, [0.5, 0.5]))


def test_cardinality_is_asserted() -> None:
    some = Dataset.range(4).filter(lambda x: x < 2)
    assert some.assert_cardinality(2).cardinality() == 2
    assert len(list(some.assert_cardinality(2))) == 2
    for count, problem in ((3, "only 2"), (1, "has more"), (-1, "infinitely many")):
        with pytest.raises(ValueError, match=problem):
            list(some.assert_cardinality(count))
    with pytest.raises(ValueError, match="expected_cardinality=-2"):
        some.assert_cardinality(-2)
    iterator = some.assert_cardinality(2).make_iterator()
    next(iterator)
    iterator.set_state(iterator.get_state())
    assert len(list(iterator)) == 1


def test_windows_are_data_sets() -> None:
    windows = Dataset.range(5).map(lambda x: {"x": x}).window(2)
    assert isinstance(windows.element_spec["x"], DatasetSpec)
    assert [len(list(window["x"])) for window in windows] == [2, 2, 1]
    kept = windows.filter(lambda window: len(window["x"]) == 2).map(lambda window: window["x"])
    assert [int(x) for x in kept.concatenate(kept).flat_map(lambda x: x)] == [0, 1, 2, 3] * 2
    with pytest.raises(TypeError, match="cannot be batched"):
        list(windows.batch(2))
    assert windows.is_batched is False


def test_arguments_that_do_not_fit() -> None:
    data, batches = Dataset.range(4), Dataset.range(4).batch(2)
    for call, text in (
        (lambda: batches.rebatch([]), "batch_size=.. has no size"),
        (lambda: batches.rebatch(0), "batch_size=0"),
        (lambda: data.window(0), "size=0"),
        (lambda: data.group_by_window(int, lambda k, d: d), "expected one of the two"),
        (lambda: data.bucket_by_sequence_length(int, [2], [1]), "one more size"),
        (lambda: data.bucket_by_sequence_length(int, [2, 1], [1, 1, 1]), "ascending"),
        (lambda: Dataset.choose_from_datasets([], data), "has no data set"),
        (lambda: list(Dataset.choose_from_datasets([data], data)), "choice_dataset gave 1"),
        (lambda: list(batches.unique()), "unique takes single numbers"),
        (
            lambda: list(data.group_by_window(int, lambda k, d: d, window_size_func=lambda k: 0)),
            "window_size_func returned 0",
        ),
        (
            lambda: list(
                _ragged(Dataset).bucket_by_sequence_length(
                    len, [3], [1, 1], pad_to_bucket_boundary=True
                )
            ),
            "an element has the length 4",
        ),
        (lambda: _empty_groups().element_spec, "group_by_window over an empty"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for wrong, text in (
        (lambda: Dataset.choose_from_datasets([3], data), "datasets has 3"),
        (lambda: Dataset.choose_from_datasets([data], 3), "choice_dataset=3"),
        (lambda: list(data.scan(0, lambda s, x: s)), "Expected a tuple of the next state"),
        (lambda: list(data.group_by_window(int, lambda k, d: 3, 1)), "reduce_func given to"),
    ):
        with pytest.raises(TypeError, match=text):
            wrong()


def _empty_groups() -> Dataset:
    return Dataset.range(0).group_by_window(lambda x: {1: 1}[int(x)], lambda k, d: d.batch(2), 2)


def test_element_spec_of_groups_covers_all_of_them() -> None:
    for rows in (_ragged(Dataset), _ragged(Dataset).take(0)):
        for options, shape in (
            ({}, (None, None)),
            ({"pad_to_bucket_boundary": True, "drop_remainder": True}, (2, None)),
            ({"no_padding": True}, (None, None)),
        ):
            batches = rows.bucket_by_sequence_length(len, [4, 7], [2, 2, 2], **options)
            assert batches.element_spec.shape == shape
        groups = rows.group_by_window(len, lambda key, group: group.batch(2, True), 2)
        assert groups.element_spec.shape == (2, None)


def test_ragged_batches_are_padded() -> None:
    batches = [batch.tolist() for batch in _ragged(Dataset).ragged_batch(2, True)]
    assert batches[0] == [[0, 0, 0, 0], [1, 2, 3, 4]]


# Distribution.


def test_a_single_batch_can_be_distributed() -> None:
    batch = {"x": np.arange(4), "y": np.arange(8).reshape(4, 2)}
    part, _ = auto_shard(Dataset.from_tensors(batch).repeat(2), 2, 1, "DATA")
    assert [element["x"].tolist() for element in part] == [[2, 3], [2, 3]]
    for single in (3, (np.arange(2), np.arange(3)), (np.arange(2), 1)):
        with pytest.raises(ValueError, match="not batched"):
            auto_shard(Dataset.from_tensors(single), 2, 0)


@pytest.mark.parametrize("name", ["rebatch", "bucket", "group", "window flat"])
def test_batches_of_new_steps_are_divided(name: str) -> None:
    make, expected = CASES[name]
    parts = [auto_shard(make(Dataset), 2, worker, "DATA")[0] for worker in range(2)]
    steps = zip(*(map(_plain, part) for part in parts), strict=True)
    assert [first + second for first, second in steps] == expected


def test_as_dataset_leaves_data_sets_alone() -> None:
    windows = Dataset.range(2).window(1)
    assert as_dataset(windows) is windows


# Names and options.


def test_every_method_takes_a_name(tmp_path: Path) -> None:
    data = Dataset.range(4, name="r")
    steps = [
        data.map(int, name="n").filter(bool, name="n").batch(2, name="n").unbatch(name="n"),
        data.flat_map(Dataset.from_tensors, name="n").take(3, name="n").skip(1, name="n"),
        data.shuffle(4, name="n").repeat(2, name="n").shard(2, 0, name="n").cache(name="n"),
        data.enumerate(name="n").prefetch(1, name="n").with_options(dx.data.Options(), name="n"),
        data.concatenate(data, name="n").unique(name="n").window(2, name="n"),
        data.padded_batch(2, name="n").rebatch(1, name="n").ignore_errors(name="n"),
        data.interleave(Dataset.from_tensors, name="n").take_while(bool, name="n"),
        data.snapshot(tmp_path / "s", name="n").ragged_batch(2, name="n"),
        Dataset.zip(data, data, name="n"),
        Dataset.from_tensor_slices([1], name="n"),
        Dataset.from_tensors(1, name="n"),
        Dataset.from_generator(lambda: iter([1]), name="n"),
        Dataset.counter(name="n").take(1),
        Dataset.random(name="n").take(1),
    ]
    assert all(len(list(step)) >= 0 for step in steps)
    assert data.reduce(0, lambda s, x: s + x, name="n") == 6
    assert data.take(1).get_single_element(name="n") == 0


def test_functions_for_apply_are_the_methods() -> None:
    names = dx.data.experimental
    data = Dataset.range(6)
    assert [int(x) for x in data.apply(names.take_while(lambda x: x < 2))] == [0, 1]
    assert data.filter(lambda x: True).apply(names.assert_cardinality(6)).cardinality() == 6
    assert len(list(data.apply(names.shuffle_and_repeat(6, 2, seed=1)))) == 12
    assert "Dataset.scan" in (names.scan.__doc__ or "")
    assert names.cardinality(data) == 6
    assert names.get_structure(data) == data.element_spec
    assert names.get_single_element(data.take(1)) == 0
    assert names.get_next_as_optional(iter(data)).get_value() == 0
    assert [int(x) for x in names.Counter(3).take(2)] == [3, 4]


def test_other_options_are_kept(tmp_path: Path) -> None:
    dx.data.experimental.save(Dataset.range(2), str(tmp_path / "s"))
    assert len(list(dx.data.experimental.load(tmp_path / "s"))) == 2
    options = dx.data.Options()
    options.autotune.enabled = True
    options.autotune.autotune_algorithm = "HILL_CLIMB"
    options.experimental_optimization.map_fusion = False
    options.experimental_slack = True
    options.framework_type = ["x"]
    merged = Dataset.range(2).with_options(options).options()
    assert merged == options
    with pytest.raises(AttributeError, match="map_fission"):
        options.experimental_optimization.map_fission = True

"""Data sets of anything iterable."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from distribax.data import Dataset, TensorSpec, as_dataset
from distribax.data.rewrites import auto_shard
from tests.conftest import RunFresh
from tests.unit.data.reference import plain, values_of


def test_a_data_set_is_itself() -> None:
    dataset = Dataset.range(3)
    assert as_dataset(dataset) is dataset


def test_arrays_give_rows_to_be_batched() -> None:
    for value in (np.arange(4), (np.arange(4), [1, 2, 3, 4]), {"x": np.zeros((4, 2))}):
        dataset = as_dataset(value)
        assert len(dataset) == 4
        with pytest.raises(ValueError, match="not batched"):
            auto_shard(dataset, 2, 0)
    jnp = pytest.importorskip("jax.numpy")
    assert values_of(as_dataset(jnp.arange(2)).batch(2)) == [[0, 1]]


def test_a_list_gives_its_batches() -> None:
    dataset = as_dataset([(np.arange(3), np.zeros(3)), [np.arange(2), np.ones(2)]])
    assert values_of(dataset) == [([0, 1, 2], [0.0] * 3), ([0, 1], [1.0] * 2)]
    assert dataset.is_batched
    assert dataset.static_batch_size == 3
    assert dataset.element_spec[0] == TensorSpec([None], np.int64)
    assert len(dataset) == 2
    assert len(values_of(dataset.shuffle(2).repeat(3))) == 6
    iterator = dataset.make_iterator()
    next(iterator)
    other = dataset.make_iterator()
    other.set_state(json.loads(json.dumps(iterator.get_state())))
    assert [plain(x) for x in other] == [([0, 1], [1.0, 1.0])]
    with pytest.raises(ValueError, match="empty"):
        as_dataset([])
    with pytest.raises(ValueError, match="no batch dimension"):
        as_dataset([1, 2])


def test_functions_make_generators_again_and_again() -> None:
    dataset = as_dataset(lambda: (np.full(2, i) for i in range(3)))
    for _ in range(2):
        assert values_of(dataset) == [[0, 0], [1, 1], [2, 2]]
    assert values_of(auto_shard(dataset, 2, 1, "DATA")[0]) == [[0], [1], [2]]
    with pytest.raises(ValueError, match=r"from_generator\(\) is not read from files"):
        auto_shard(dataset, 2, 0, "FILE")


def test_generators_can_be_iterated_once() -> None:
    dataset = as_dataset(np.full(2, i) for i in range(3))
    assert values_of(dataset.map(lambda x: x + 1).prefetch(1)) == [[1, 1], [2, 2], [3, 3]]
    with pytest.raises(ValueError, match="cannot be iterated twice"):
        values_of(dataset)
    with pytest.raises(ValueError, match="a generator or iterator> is not read from files"):
        auto_shard(as_dataset(iter([np.zeros(2)])), 2, 0, "FILE")


def test_other_iterables_can_be_iterated_again_but_not_resumed() -> None:
    class Loader:
        """Counts like a loader of another library."""

        def __init__(self, sized: bool) -> None:
            if sized:
                self.__class__ = type("SizedLoader", (Loader,), {"__len__": lambda self: 2})

        def __iter__(self) -> Any:
            yield {"x": np.zeros(2), "y": [np.ones(2), np.ones(2)]}
            yield {"x": np.zeros(1), "y": (np.ones(1), np.ones(1))}

    assert as_dataset(Loader(sized=True)).cardinality() == 2
    dataset = as_dataset(Loader(sized=False))
    assert dataset.cardinality() == -2
    for _ in range(2):
        assert [element["x"].shape for element in dataset] == [(2,), (1,)]
    # Pairs that a loader collated into a list are a tuple.
    assert isinstance(next(iter(dataset))["y"], tuple)
    assert dataset.element_spec["x"] == TensorSpec([None], np.float64)
    assert dataset.is_batched is None
    with pytest.raises(ValueError, match="iterable of type Loader cannot be saved"):
        dataset.make_iterator().get_state()


def test_what_cannot_be_iterated_is_refused() -> None:
    for value in (3, None, np.float32(1)):
        with pytest.raises(TypeError, match="cannot be made of"):
            as_dataset(value)


def test_grain_data_sets_and_loaders_can_be_resumed() -> None:
    import grain

    array = np.arange(20)
    source = grain.MapDataset.source(array).map(lambda x: x * 2)
    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 20, 1),
        sampler=grain.samplers.SequentialSampler(
            num_records=20, shard_options=grain.sharding.NoSharding()
        ),
        operations=[grain.transforms.Batch(4)],
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=1),
    )
    for value, length in (
        (source.batch(4), 5),
        (source.to_iter_dataset().batch(4), -2),
        (loader, -2),
    ):
        dataset = as_dataset(value)
        assert dataset.cardinality() == length
        expected = values_of(dataset)
        assert [len(batch) for batch in expected] == [4] * 5
        assert values_of(dataset) == expected
        iterator = dataset.map(lambda x: x).prefetch(1).make_iterator()
        states = [json.dumps(iterator.get_state())]
        for _ in iterator:
            states.append(json.dumps(iterator.get_state()))
        for position, state in enumerate(states):
            other = as_dataset(value).map(lambda x: x).prefetch(1).make_iterator()
            other.set_state(json.loads(state))
            assert [plain(x) for x in other] == expected[position:]
            other.close()
        assert dataset.element_spec.shape == (None,)


def test_grain_iterators_can_be_resumed_but_not_restarted() -> None:
    import grain

    iterator = iter(grain.MapDataset.range(6).batch(2).to_iter_dataset())
    dataset = as_dataset(iterator)
    running = dataset.make_iterator()
    first = plain(next(running))
    state = running.get_state()
    assert plain(next(running)) == [2, 3]
    with pytest.raises(ValueError, match="cannot be iterated twice"):
        next(dataset.make_iterator())
    assert first == [0, 1]
    other = as_dataset(iter(grain.MapDataset.range(6).batch(2).to_iter_dataset())).make_iterator()
    other.set_state(state)
    assert [plain(x) for x in other] == [[2, 3], [4, 5]]


def test_torch_loaders() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data
    pairs = data.TensorDataset(torch.arange(5), torch.ones(5, 2))
    dataset = as_dataset(data.DataLoader(pairs, batch_size=2))
    assert dataset.cardinality() == 3
    for _ in range(2):
        elements = list(dataset)
        assert [plain(x) for x, _ in elements] == [[0, 1], [2, 3], [4]]
        assert all(isinstance(y, np.ndarray) for _, y in elements)
    assert dataset.element_spec == (
        TensorSpec([None], np.int64),
        TensorSpec([None, 2], np.float32),
    )
    assert values_of(auto_shard(dataset.map(lambda x, y: x), 2, 1, "DATA")[0]) == [[1], [3], []]
    with pytest.raises(ValueError, match="a torch DataLoader cannot be saved"):
        dataset.make_iterator().get_state()
    with pytest.raises(ValueError, match="a torch DataLoader> is not read from files"):
        auto_shard(dataset, 2, 0, "FILE")


@pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="needs tensorflow")
def test_tf_data_sets(run_fresh: RunFresh) -> None:
    # TensorFlow sets environment variables and starts threads, so it has a process of its own.
    program = """
        import tensorflow as tf
        from distribax.data import as_dataset

        theirs = tf.data.Dataset.range(5).map(lambda x: {"x": x, "t": "text"}).batch(2)
        dataset = as_dataset(theirs)
        print(dataset.cardinality(), dataset.element_spec)
        for _ in range(2):
            print([element["x"].tolist() for element in dataset])
        ragged = tf.data.Dataset.from_generator(lambda: iter([[1], [1, 2]]), tf.int32)
        print(as_dataset(ragged).element_spec)
        try:
            dataset.make_iterator().get_state()
        except ValueError as error:
            print(str(error).split(":")[0])
    """
    spec = {"x": TensorSpec([None], np.int64), "t": TensorSpec([None], bytes)}
    assert run_fresh(program, TF_CPP_MIN_LOG_LEVEL="3").split("\n") == [
        f"3 {spec}",
        "[[0, 1], [2, 3], [4]]",
        "[[0, 1], [2, 3], [4]]",
        "TensorSpec(shape=(None,), dtype=dtype('int32'))",
        "the position in a tf.data data set cannot be saved",
    ]


def test_a_dict_without_rows_is_not_iterated_by_its_keys() -> None:
    with pytest.raises(TypeError, match=r"made of the dict \{'a': 1\}: not all its values"):
        as_dataset({"a": 1})

"""The seeds' and TensorFlow's numbers of shards, and what the partitioners refuse."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx

partitioners = dx.partitioners


def test_fixed_shards_as_in_the_seeds() -> None:
    partitioner = partitioners.FixedShardsPartitioner(num_shards=2)
    assert partitioner((10, 3), jnp.float32, axis=0) == [2, 1]
    assert partitioner((10, 3), jnp.float32, axis=1) == [1, 2]


def test_minimum_size_as_in_the_seeds() -> None:
    few = partitioners.MinSizePartitioner(min_shard_bytes=24, max_shards=4)
    many = partitioners.MinSizePartitioner(min_shard_bytes=24, max_shards=8)
    assert few((10, 3), jnp.float32, axis=0) == [4, 1]
    assert many((10, 3), jnp.float32, axis=0) == [5, 1]


@pytest.mark.parametrize(
    ("partitioner", "expected"),
    [
        (partitioners.MinSizePartitioner(min_shard_bytes=4, max_shards=2), [2, 1]),
        (partitioners.MinSizePartitioner(min_shard_bytes=4, max_shards=10), [6, 1]),
        (partitioners.MinSizePartitioner(), [1, 1]),
        (partitioners.MaxSizePartitioner(max_shard_bytes=4), [6, 1]),
        (partitioners.MaxSizePartitioner(max_shard_bytes=4, max_shards=2), [2, 1]),
        (partitioners.MaxSizePartitioner(max_shard_bytes=1024), [1, 1]),
        (partitioners.MaxSizePartitioner(max_shard_bytes=1), [6, 1]),
        (partitioners.MaxSizePartitioner(max_shard_bytes=9), [3, 1]),
        (partitioners.FixedShardsPartitioner(9), [6, 1]),
    ],
)
def test_numbers_of_tensorflow(partitioner: Any, expected: list[int]) -> None:
    assert partitioner((6, 1), np.float32) == expected


def test_data_types_count_by_their_size() -> None:
    partitioner = partitioners.MinSizePartitioner(min_shard_bytes=16, max_shards=100)
    assert partitioner((8, 4), jnp.bfloat16) == [4, 1]
    assert partitioner((8, 4), np.float64) == [8, 1]
    by_strings = partitioners.MinSizePartitioner(64, max_shards=100, bytes_per_string=32)
    assert by_strings((8, 1), np.dtype("U5")) == [4, 1]
    small = partitioners.MaxSizePartitioner(64, bytes_per_string=32)
    assert small((8, 1), str) == [4, 1]


def test_nothing_is_divided_into_nothing() -> None:
    for partitioner in (
        partitioners.FixedShardsPartitioner(2),
        partitioners.MinSizePartitioner(1, 2),
        partitioners.MaxSizePartitioner(1),
    ):
        assert partitioner((0, 3), np.float32) == [1, 1]


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: partitioners.FixedShardsPartitioner(0), "FixedShardsPartitioner: num_shards=0"),
        (lambda: partitioners.FixedShardsPartitioner(True), "num_shards=True"),
        (lambda: partitioners.MinSizePartitioner(0), "min_shard_bytes=0"),
        (lambda: partitioners.MinSizePartitioner(max_shards=-1), "max_shards=-1"),
        (lambda: partitioners.MinSizePartitioner(bytes_per_string=0), "bytes_per_string=0"),
        (lambda: partitioners.MaxSizePartitioner(0), "max_shard_bytes=0"),
        (lambda: partitioners.MaxSizePartitioner(1, max_shards=0), "max_shards=0"),
        (lambda: partitioners.MaxSizePartitioner(1, bytes_per_string=0), "bytes_per_string=0"),
    ],
)
def test_wrong_settings_are_named(make: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}\. Expected a number of at least 1"):
        make()


def test_an_axis_that_there_is_not() -> None:
    partitioner = partitioners.FixedShardsPartitioner(2)
    with pytest.raises(ValueError, match=r"axis=2, but shape=\(10, 3\) has 2 dimension"):
        partitioner((10, 3), np.float32, axis=2)
    with pytest.raises(ValueError, match="a scalar cannot be divided"):
        partitioner((), np.float32)


@pytest.mark.parametrize(
    "partitioner",
    [
        partitioners.FixedShardsPartitioner(2),
        partitioners.MinSizePartitioner(1, 2),
        partitioners.MaxSizePartitioner(1),
    ],
    ids=lambda partitioner: type(partitioner).__name__,
)
def test_wrong_arguments_are_named(partitioner: Any) -> None:
    for shape in (5, (None, 3), (4.0, 3), (-4, 3), "ab"):
        with pytest.raises(ValueError, match=re.escape(f"shape={shape!r}. Expected a tuple")):
            partitioner(shape, np.float32)
    for axis in ("x", 0.0, True, None):
        with pytest.raises(ValueError, match=rf"axis={axis!r}\. Expected the number"):
            partitioner((10, 3), np.float32, axis=axis)
    assert partitioner(np.array([10, 3]), np.float32, axis=np.int64(-1))[0] == 1


def test_a_data_type_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="dtype='float33' is not a data type"):
        partitioners.MinSizePartitioner(1, 2)((10, 3), "float33")


def test_a_rule_of_ones_own(strategy: Any) -> None:
    class Mine(partitioners.Partitioner):
        def __call__(self, shape: Any, dtype: Any, axis: int = 0) -> list[int]:
            return [3, *[1] * (len(shape) - 1)]

    with pytest.raises(NotImplementedError, match=r"__call__\(self, shape, dtype"):
        partitioners.Partitioner()((1,), np.float32)
    strategy.variable_partitioner = Mine()
    with strategy.scope():
        v = dx.Variable(np.zeros((10, 2), np.float32))
    assert [part.shape for part in v] == [(4, 2), (3, 2), (3, 2)]


@pytest.mark.parametrize("parts", [[1, 2], [2], [0, 1], None, [2.0, 1], "ab"])
def test_partitions_that_cannot_be(strategy: Any, parts: Any) -> None:
    strategy.variable_partitioner = lambda shape, dtype: parts
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"variable_partitioner: for variable 'w'.*by rows"),
    ):
        dx.Variable(np.zeros((4, 4), np.float32), name="w")

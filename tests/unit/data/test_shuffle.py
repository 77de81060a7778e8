"""Shuffling: tf.data's meaning of the buffer, seeds, and orders of successive passes."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from distribax.data import UNKNOWN_CARDINALITY, Dataset
from tests.unit.data.reference import values_of


def _sources(size: int) -> list[Dataset]:
    """Returns a source that can be indexed and one that can only be read."""
    return [Dataset.range(size), Dataset.range(size).filter(lambda x: True)]


@pytest.mark.parametrize("buffer", [1, 2, 7, 19, 20, 50, UNKNOWN_CARDINALITY])
def test_an_element_never_comes_earlier_than_the_buffer_allows(buffer: int) -> None:
    for source in _sources(20):
        seen = values_of(source.shuffle(buffer, seed=3))
        assert sorted(seen) == list(range(20))
        places = buffer if buffer > 0 else 20
        # At step i only the first i + places elements (and the one that replaces) have been read.
        assert all(number < position + places for position, number in enumerate(seen))
    if buffer == 1:
        assert seen == list(range(20))


def test_every_order_is_as_likely_when_the_buffer_holds_all() -> None:
    for source in _sources(3):
        orders = [tuple(values_of(source.shuffle(3, seed=seed))) for seed in range(300)]
        counts = collections.Counter(orders)
        assert len(counts) == 6
        # 50 each are expected; the seeds are fixed, so this either always holds or never.
        assert min(counts.values()) > 25


def test_seeds_fix_the_orders_of_all_passes() -> None:
    for source in _sources(30):
        first, again = source.shuffle(30, seed=5), source.shuffle(30, seed=5)
        passes = [values_of(first) for _ in range(3)]
        assert passes == [values_of(again) for _ in range(3)]
        assert passes[0] != passes[1] != passes[2] != passes[0]
        assert values_of(source.shuffle(30, seed=6)) != passes[0]
        assert values_of(source.shuffle(30, seed=-6)) != passes[0]


def test_reshuffling_can_be_switched_off() -> None:
    for source in _sources(30):
        for seed in (None, 4):
            fixed = source.shuffle(30, seed=seed, reshuffle_each_iteration=False)
            once = values_of(fixed)
            assert values_of(fixed) == once
            assert values_of(fixed.repeat(2)) == once + once


def test_repetitions_are_shuffled_anew() -> None:
    for source in _sources(30):
        twice = values_of(source.shuffle(30, seed=1).repeat(2))
        assert twice[:30] != twice[30:]
        nested = values_of(source.shuffle(30, seed=1).repeat(2).repeat(2))
        passes = {tuple(nested[i : i + 30]) for i in range(0, 120, 30)}
        assert len(passes) == 4


def test_without_a_seed_orders_differ() -> None:
    for source in _sources(50):
        assert values_of(source.shuffle(50)) != values_of(source.shuffle(50))


def test_shuffles_of_inner_data_sets_differ_from_each_other() -> None:
    dataset = Dataset.range(2).flat_map(lambda _: Dataset.range(30).shuffle(30, seed=1))
    seen = values_of(dataset)
    assert sorted(seen[:30]) == sorted(seen[30:])
    assert seen[:30] != seen[30:]


def test_a_shuffled_order_can_be_skipped_taken_and_sharded() -> None:
    shuffled = Dataset.range(20).shuffle(8, seed=2)
    order = values_of(shuffled)
    for part, expected in (
        (Dataset.range(20).shuffle(8, seed=2).skip(3), order[3:]),
        (Dataset.range(20).shuffle(8, seed=2).take(5), order[:5]),
        (Dataset.range(20).shuffle(8, seed=2).shard(3, 1), order[1::3]),
    ):
        assert values_of(part.batch(4)) == [expected[i : i + 4] for i in range(0, len(expected), 4)]
    twice = Dataset.range(20).shuffle(8, seed=2).shuffle(20, seed=3)
    assert sorted(values_of(twice)) == list(range(20))


def test_large_buffers_and_many_elements_agree_with_a_step_by_step_shuffle() -> None:
    # Enough elements for several blocks of draws.
    size, buffer = 30_000, 700
    fused, streamed = (source.shuffle(buffer, seed=9).batch(size) for source in _sources(size))
    (one,), (other,) = fused, streamed
    assert np.array_equal(one, other)
    assert np.array_equal(np.sort(one), np.arange(size))

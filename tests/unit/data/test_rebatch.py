"""Splitting batches over replicas, with the examples of the documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribax.data import Dataset
from distribax.data.rewrites import SplitBatch, auto_shard
from tests.unit.data.reference import plain


def _split(dataset: Dataset, num_replicas: int) -> list[SplitBatch]:
    """Returns the batches of a data set, split over the replicas of one worker."""
    return list(auto_shard(dataset, 1, 0, replicas_per_worker=num_replicas, split=True)[0])


def _replicas(dataset: Dataset, num_replicas: int) -> list[list[list[int]]]:
    """Returns, for each replica, its pieces in the order of the steps."""
    steps = _split(dataset, num_replicas)
    return [[plain(step.pieces[replica]) for step in steps] for replica in range(num_replicas)]


def test_the_examples_of_the_documents() -> None:
    assert _replicas(Dataset.range(10).batch(4), 2) == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    assert _replicas(Dataset.range(8).batch(4), 3) == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
        [[], []],
    ]
    assert _replicas(Dataset.range(10).batch(5), 3) == [
        [[0, 1], [5, 6]],
        [[2, 3], [7, 8]],
        [[4], [9]],
    ]


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_are_the_batch_in_order_and_of_the_size_promised(rows: int, replicas: int) -> None:
    batch = {"x": np.arange(rows * 2).reshape(rows, 2), "y": (np.arange(rows),)}
    (step,) = _split(Dataset.from_tensors(batch), replicas)
    pieces: Any = step.pieces
    assert len(pieces) == replicas
    assert np.array_equal(np.concatenate([piece["x"] for piece in pieces]), batch["x"])
    assert np.array_equal(np.concatenate([piece["y"][0] for piece in pieces]), batch["y"][0])
    full = -(-rows // replicas)
    assert [len(piece["x"]) for piece in pieces] == [
        min(full, max(0, rows - replica * full)) for replica in range(replicas)
    ]


def test_pieces_are_views() -> None:
    (step,) = _split(Dataset.range(8).batch(8), 2)
    assert all(np.shares_memory(piece, step.batch) for piece in step.pieces)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.float32(3), "no batch dimension"),
        ((np.zeros(3), b"text"), "no batch dimension"),
        ((np.zeros(3), np.zeros(4)), "differ in their first dimension"),
        ((), "empty nest"),
    ],
)
def test_what_is_no_batch_is_refused(batch: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _split(Dataset.from_generator(lambda: [batch]), 2)

"""Splitting batches over replicas, with the examples of the documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribax.data import Dataset
from distribax.data.rewrites import split_batch
from tests.unit.data.reference import plain


def _replicas(dataset: Dataset, num_replicas: int) -> list[list[list[int]]]:
    """Returns, for each replica, its pieces in the order of the steps."""
    steps = [split_batch(batch, num_replicas) for batch in dataset]
    return [[plain(step[replica]) for step in steps] for replica in range(num_replicas)]


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
    pieces = split_batch(batch, replicas)
    assert len(pieces) == replicas
    assert np.array_equal(np.concatenate([piece["x"] for piece in pieces]), batch["x"])
    assert np.array_equal(np.concatenate([piece["y"][0] for piece in pieces]), batch["y"][0])
    full = -(-rows // replicas)
    assert [len(piece["x"]) for piece in pieces] == [
        min(full, max(0, rows - replica * full)) for replica in range(replicas)
    ]


def test_pieces_are_views() -> None:
    batch = np.arange(8)
    assert all(np.shares_memory(piece, batch) for piece in split_batch(batch, 2))


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
        split_batch(batch, 2)


def test_at_least_one_replica() -> None:
    with pytest.raises(ValueError, match="num_replicas=0"):
        split_batch(np.zeros(3), 0)

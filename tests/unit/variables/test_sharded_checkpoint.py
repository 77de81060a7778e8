"""A sharded variable is saved whole, and restored whatever the number of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx

TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)


def _made(where: Any, value: np.ndarray) -> tuple[Any, Any, Any]:
    with where.scope():
        table = dx.Variable(value, name="table")
        optimizer = dx.Optimizer(optax.adam(0.1))
        optimizer.build([table])
    return table, optimizer, dx.Checkpoint(model=[table], optimizer=optimizer)


@pytest.fixture
def saved(strategy: Any, tmp_path: Path) -> tuple[str, list[np.ndarray]]:
    """A checkpoint of a table in two shards, with what is in it."""
    table, optimizer, checkpoint = _made(strategy, TABLE)
    loss = lambda: jnp.sum(dx.embedding_lookup(table, [0, 9]) ** 2)  # noqa: E731
    optimizer.minimize(loss, [table])
    path = checkpoint.save(tmp_path / "saved")
    table.assign(np.zeros_like(TABLE))
    return path, _slots(optimizer)


def _slots(optimizer: Any) -> list[np.ndarray]:
    return [slot.numpy() for slot in optimizer.variables]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 10])
def test_another_number_of_shards(strategy: Any, saved: Any, num_shards: int) -> None:
    strategy.variable_partitioner = dx.partitioners.FixedShardsPartitioner(num_shards)
    _check_restored(*_made(strategy, np.zeros_like(TABLE)), saved)


@pytest.mark.parametrize("kind", [dx.MirroredStrategy, dx.OneDeviceStrategy])
def test_another_strategy(saved: Any, kind: Any) -> None:
    where = kind(["CPU:0", "CPU:1"]) if kind is dx.MirroredStrategy else kind("CPU:0")
    _check_restored(*_made(where, np.zeros_like(TABLE)), saved)


def _check_restored(table: Any, optimizer: Any, checkpoint: Any, saved: Any) -> None:
    path, slots = saved
    checkpoint.restore(path)
    changed = np.flatnonzero((table.numpy() != TABLE).any(axis=1))
    assert changed.tolist() == [0, 9]
    for got, want in zip(_slots(optimizer), slots, strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(optimizer.iterations.numpy()) == 1


def test_from_another_strategy(strategy: Any, tmp_path: Path) -> None:
    _, _, checkpoint = _made(dx.OneDeviceStrategy("CPU:0"), TABLE)
    path = checkpoint.save(tmp_path / "saved")
    table, _, checkpoint = _made(strategy, np.zeros_like(TABLE))
    assert isinstance(table, dx.ShardedVariable)
    checkpoint.restore(path)
    np.testing.assert_array_equal(table.numpy(), TABLE)


def test_another_shape(strategy: Any, saved: Any) -> None:
    _, _, checkpoint = _made(strategy, np.zeros((11, 2), np.float32))
    with pytest.raises(ValueError, match=r"saved with shape \(10, 2\), but sharded variable"):
        checkpoint.restore(saved[0])

"""Tables in shards on two servers, looked up and trained by workers: with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx

NUM_USERS, NUM_ITEMS, SIZE = 40, 30, 4


@pytest.fixture
def divided(
    strategy: dx.ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> dx.ParameterServerStrategy:
    """The strategy, dividing tables of more than 512 bytes."""
    partitioner = dx.partitioners.MinSizePartitioner(min_shard_bytes=512, max_shards=2)
    monkeypatch.setattr(strategy, "variable_partitioner", partitioner)
    return strategy


def test_workers_read_and_write_rows(divided: Any, coordinator: Any) -> None:
    value = np.arange(200, dtype=np.float32).reshape(100, 2)
    with divided.scope():
        table = dx.Variable(value, name="table")
    assert len(table.variables) == 2 and len(set(table.devices)) == 2

    def work(index: int) -> Any:
        table.scatter_add(dx.IndexedSlices(np.ones((1, 2), np.float32), np.array([index])))
        return dx.embedding_lookup(table, [index, 99 - index]), table.shape

    results = coordinator.fetch([coordinator.schedule(work, args=(index,)) for index in range(10)])
    for index, (rows, shape) in enumerate(results):
        np.testing.assert_array_equal(rows[0], value[index] + 1)
        assert shape == (100, 2)
    value[:10] += 1
    np.testing.assert_array_equal(table.numpy(), value)


def test_an_id_that_the_table_does_not_have(divided: Any, coordinator: Any) -> None:
    with divided.scope():
        table = dx.Variable(np.zeros((100, 2), np.float32), name="table")
    coordinator.schedule(dx.function(lambda ids: dx.embedding_lookup(table, ids)), args=([7, 100],))
    with pytest.raises(ValueError, match=r"ids\[1\] is 100, but sharded variable 'table'"):
        coordinator.join()


def _ratings() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    users, items = rng.normal(size=(NUM_USERS, 2)), rng.normal(size=(NUM_ITEMS, 2))
    user, item = rng.integers(0, NUM_USERS, 600), rng.integers(0, NUM_ITEMS, 600)
    return user, item, np.sum(users[user] * items[item], axis=-1).astype(np.float32)


def test_a_recommender_is_trained(divided: Any, coordinator: Any, tmp_path: Path) -> None:
    user, item, rating = _ratings()
    rng = np.random.default_rng(4)
    with divided.scope():
        users = dx.Variable(rng.normal(size=(NUM_USERS, SIZE)).astype(np.float32) * 0.5, name="u")
        items = dx.Variable(rng.normal(size=(NUM_ITEMS, SIZE)).astype(np.float32) * 0.5, name="i")
        bias = dx.Variable(0.0, name="bias")
        optimizer = dx.Optimizer(optax.adam(0.05))
    variables = [users, items, bias]
    assert isinstance(users, dx.ShardedVariable) and isinstance(items, dx.Variable)

    def loss(user: Any, item: Any, rating: Any) -> Any:
        rows = dx.embedding_lookup(users, user) * dx.embedding_lookup(items, item)
        return jnp.mean((jnp.sum(rows, axis=-1) + bias - rating) ** 2)

    @dx.function
    def step(iterator: Any) -> Any:
        def replica(user: Any, item: Any, rating: Any) -> Any:
            value, grads = dx.value_and_grad(loss, variables)(user, item, rating)
            assert [isinstance(grad, dx.IndexedSlices) for grad in grads] == [True, True, False]
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return value

        return divided.run(replica, args=next(iterator))

    def dataset_fn() -> Any:
        rows = dx.data.Dataset.from_tensor_slices((user, item, rating))
        return rows.shuffle(600).repeat().batch(50)

    before = float(loss(user, item, rating))
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for _ in range(200):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    after = float(loss(user, item, rating))
    assert after < 0.2 * before
    # The optimizer was built by workers; here it has the same state, in shards.
    assert int(optimizer.iterations.numpy()) == 200
    slots = [slot for slot in optimizer.variables if isinstance(slot, dx.ShardedVariable)]
    assert [slot.shape for slot in slots] == [users.shape, users.shape]
    assert [part.device for part in slots[0]] == [part.device for part in users]
    _check_checkpoint(variables, optimizer, tmp_path)


def _check_checkpoint(variables: list[Any], optimizer: Any, tmp_path: Path) -> None:
    path = dx.Checkpoint(model=variables, optimizer=optimizer).save(tmp_path / "saved")
    same = [dx.Variable(np.zeros(v.shape, np.float32)) for v in variables]
    again = dx.Optimizer(optax.adam(0.05))
    again.build(same)
    dx.Checkpoint(model=same, optimizer=again).restore(path)
    pairs = zip([*variables, *optimizer.variables], [*same, *again.variables], strict=True)
    for served, here in pairs:
        np.testing.assert_array_equal(served.numpy(), here.numpy())

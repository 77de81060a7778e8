"""A recommender on parameter servers: embeddings on servers, steps on workers, no waiting.

Run it with `python examples/parameter_server.py`: the cluster is on this machine and ends with the
program. Or start its processes separately, as on several machines:
`distribax run --workers 2 --ps 2 examples/parameter_server.py`.

Users and items have hidden tastes; the model sees who liked what and learns a vector for each. The
tables are divided over the servers, and a step moves only the rows that its batch mentions.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

NUM_USERS, NUM_ITEMS, NUM_TASTES = 2_000, 1_000, 4
BATCH_SIZE = 1_024


def liked(seed: int, count: int) -> dict[str, np.ndarray]:
    """Returns pairs of a user and an item, and whether the user liked it."""
    hidden = np.random.default_rng(0)
    users = hidden.normal(size=(NUM_USERS, NUM_TASTES))
    items = hidden.normal(size=(NUM_ITEMS, NUM_TASTES))
    rng = np.random.default_rng(seed)
    user = rng.integers(0, NUM_USERS, count)
    item = rng.integers(0, NUM_ITEMS, count)
    score = np.sum(users[user] * items[item], axis=1)
    return {
        "user": user.astype(np.int32),
        "item": item.astype(np.int32),
        "liked": (score > 0).astype(np.float32),
    }


class Recommender:
    """A vector for each user and each item; those that match point in the same direction."""

    def __init__(self, dimension: int = 8) -> None:
        rng = np.random.default_rng(1)

        def table(rows: int, name: str) -> Any:
            values = rng.normal(size=(rows, dimension)).astype(np.float32) * 0.3
            return dx.Variable(values, name=name)

        self.users = table(NUM_USERS, "users")
        self.items = table(NUM_ITEMS, "items")
        self.bias = dx.Variable(0.0, name="bias")

    @property
    def variables(self) -> list[Any]:
        return [self.users, self.items, self.bias]

    def __call__(self, batch: dict[str, Any]) -> Any:
        user = dx.embedding_lookup(self.users, batch["user"])
        item = dx.embedding_lookup(self.items, batch["item"])
        return jnp.sum(user * item, axis=-1) + self.bias.value()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=900)
    options = parser.parse_args()

    # Large tables are divided, so that no server holds a whole one.
    partitioner = dx.partitioners.MinSizePartitioner(16 << 10, max_shards=options.ps)
    if "TF_CONFIG" in os.environ:
        resolver = dx.cluster_resolver.TFConfigClusterResolver()
        strategy = dx.ParameterServerStrategy(resolver, partitioner)
    else:
        strategy = dx.ParameterServerStrategy(
            None, partitioner, num_workers=options.workers, num_ps=options.ps
        )
    coordinator = dx.coordinator.ClusterCoordinator(strategy)

    with strategy.scope():
        model = Recommender()
        optimizer = dx.Optimizer(optax.adam(0.02))
        loss_of_epoch = dx.metrics.Mean()

    def dataset_fn() -> Any:
        # Called on each worker: all of them read all of the data, each in its own order.
        rows = dx.data.Dataset.from_tensor_slices(liked(seed=2, count=200_000))
        return rows.shuffle(200_000).repeat().batch(BATCH_SIZE)

    @dx.function
    def step(iterator: Any) -> None:
        def replica(batch: dict[str, Any]) -> None:
            def loss_fn() -> Any:
                logits = model(batch)
                return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["liked"]))

            loss, grads = dx.value_and_grad(loss_fn, model.variables)()
            optimizer.apply_gradients(zip(grads, model.variables, strict=True))
            loss_of_epoch.update_state(loss)

        strategy.run(replica, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for epoch in range(3):
        loss_of_epoch.reset_state()
        for _ in range(options.steps // 3):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        print(f"epoch {epoch}: loss {float(loss_of_epoch.result()):.3f}")

    unseen = liked(seed=3, count=20_000)
    guess = jax.device_get(model(unseen)) > 0
    print(f"right on unseen pairs: {np.mean(guess == (unseen['liked'] > 0.5)):.1%}")
    strategy.close()


if __name__ == "__main__":
    main()

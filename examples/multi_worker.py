"""Trains a small network on several workers, each with its own devices.

    distribax run --workers 2 --devices-per-worker 2 examples/multi_worker.py --epochs 5

Without the launcher it is a single worker: python examples/multi_worker.py
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

GLOBAL_BATCH = 64
EXAMPLES = 2048


def generate() -> tuple[np.ndarray, np.ndarray]:
    """Returns points and whether each is inside a circle; the same on every worker."""
    points = np.random.default_rng(0).uniform(-1, 1, size=(EXAMPLES, 2)).astype(np.float32)
    return points, ((points**2).sum(axis=1) < 0.5).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    # This comes first: it connects the workers, which must happen before JAX computes anything.
    strategy = dx.MultiWorkerMirroredStrategy()
    data = dx.data.Dataset.from_tensor_slices(generate()).shuffle(EXAMPLES, seed=0)
    sharding = dx.data.Options()
    # Every worker creates the whole data set and keeps its share of each global batch.
    sharding.experimental_distribute.auto_shard_policy = dx.data.AutoShardPolicy.DATA
    dataset = strategy.experimental_distribute_dataset(
        data.batch(GLOBAL_BATCH, drop_remainder=True).with_options(sharding)
    )

    # All workers start with the initial values of worker 0, so they need no common seed.
    random = np.random.default_rng(jax.process_index())
    with strategy.scope():
        hidden = dx.Variable(random.normal(size=(2, 32)).astype(np.float32))
        bias = dx.Variable(jnp.zeros(32))
        output = dx.Variable(random.normal(scale=0.2, size=32).astype(np.float32))
        output_bias = dx.Variable(jnp.zeros(()))
        optimizer = dx.Optimizer(optax.adam(1e-2))
        mean_loss, accuracy = dx.metrics.Mean(), dx.metrics.Mean()
    variables = [hidden, bias, output, output_bias]

    def replica_step(points: jax.Array, labels: jax.Array) -> None:
        def loss_fn() -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            logits = jax.nn.relu(points @ hidden + bias) @ output + output_bias
            per_example = optax.sigmoid_binary_cross_entropy(logits, labels)
            loss = dx.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
            return loss, (per_example, (logits > 0) == (labels > 0.5))

        (_, (per_example, right)), gradients = dx.value_and_grad(loss_fn, variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        mean_loss.update_state(per_example)
        accuracy.update_state(right.astype(jnp.float32))

    @dx.function
    def train_step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    chief = jax.process_index() == 0
    for epoch in range(options.epochs):
        mean_loss.reset_state()
        accuracy.reset_state()
        for batch in dataset:
            train_step(batch)
        # Reading a metric adds up the shares of all workers, so all must read it; one prints it.
        loss, right = float(mean_loss.result()), float(accuracy.result())
        if chief:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.3f}")
    replicas = strategy.num_replicas_in_sync
    print(f"worker {jax.process_index()} of {jax.process_count()} is done: {replicas} replicas")


if __name__ == "__main__":
    main()

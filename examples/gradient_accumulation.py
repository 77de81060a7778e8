"""Trains with batches that are four times as large as what fits into memory.

    python examples/gradient_accumulation.py --devices 2 --steps 200

The recipe is the usual one, as in Hugging Face Accelerate's example of gradient accumulation: the
gradients of several small batches are averaged, and then applied once. `dx.Optimizer` does it; the
last line compares the result with that of the large batch.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

SMALL_BATCH, ACCUMULATED = 16, 4


def train(strategy: dx.Strategy, steps: int, accumulate: bool = True) -> list[float]:
    """Takes steps of 64 examples, at once or in 4 parts; returns the weights after the last."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1_024, 4)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    parts = ACCUMULATED if accumulate else 1
    batch = SMALL_BATCH if accumulate else SMALL_BATCH * ACCUMULATED
    dataset = dx.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch)

    with strategy.scope():
        w = dx.Variable(jnp.zeros(4))
        optimizer = dx.Optimizer(optax.adam(0.05), gradient_accumulation_steps=parts)

    def replica_step(x: jax.Array, y: jax.Array) -> None:
        def loss_fn() -> jax.Array:
            return dx.compute_average_loss((x @ w - y) ** 2, global_batch_size=batch)

        optimizer.minimize(loss_fn, [w])

    @dx.function
    def train_step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(steps * parts):
        train_step(next(batches))
    return w.numpy().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    in_parts = train(strategy, options.steps)
    at_once = train(strategy, options.steps, accumulate=False)
    print(f"weights {np.round(in_parts, 3).tolist()}")
    print(f"the same with large batches: {np.allclose(in_parts, at_once, atol=1e-3)}")


if __name__ == "__main__":
    main()

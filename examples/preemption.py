"""Is told to stop in the middle, saves, and continues after a restart as if nothing had happened.

    python examples/preemption.py --directory checkpoints --stop-at 30; echo $?   # prints 42
    python examples/preemption.py --directory checkpoints                         # continues

The recipe is that of TensorFlow's guide to PreemptionCheckpointHandler. `--stop-at` plays the part
of the machine's owner: it sends SIGTERM at that step. `distribax run examples/preemption.py ...`
starts the program again by itself when it ends with exit code 42.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx


def train(strategy: dx.Strategy, steps: int, directory: str, stop_at: int | None) -> list[float]:
    """Trains up to a number of steps, counted over all runs; returns the weights."""
    x = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 3.0], np.float32)
    dataset = dx.data.Dataset.from_tensor_slices((x, y)).shuffle(512, seed=0).repeat().batch(32)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        w = dx.Variable(jnp.zeros(3))
        optimizer = dx.Optimizer(optax.adam(0.05))
        optimizer.build([w])

    @dx.function
    def train_step(iterator: Any) -> None:
        def replica_step(x: jax.Array, y: jax.Array) -> None:
            def loss_fn() -> jax.Array:
                return dx.compute_average_loss((x @ w - y) ** 2, global_batch_size=32)

            optimizer.minimize(loss_fn, [w])

        # The batch is fetched inside, so that a batch that was not used is not skipped later.
        strategy.run(replica_step, args=next(iterator))

    checkpoint = dx.Checkpoint(w=w, optimizer=optimizer, data=iterator)
    with dx.PreemptionCheckpointHandler(None, checkpoint, directory) as handler:
        print(f"begins at step {handler.total_run_calls}", flush=True)
        while handler.total_run_calls < steps:
            if handler.total_run_calls == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            handler.run(train_step, iterator)
    return w.numpy().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--stop-at", type=int, default=None)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    weights = train(strategy, options.steps, options.directory, options.stop_at)
    print(f"weights {weights}")


if __name__ == "__main__":
    main()

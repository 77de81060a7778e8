"""Evaluates on data whose number of examples no batch size divides: every example counts once.

    python examples/uneven_evaluation.py --devices 4 --examples 1003

The recipe is that of Flax's ImageNet example, which pads the last batch and masks the padding.
Here nothing is padded: the last batch is split unevenly, a replica may even get nothing, and
metrics count what there is.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

BATCH = 64


def train(strategy: dx.Strategy, examples: int) -> list[float]:
    """Returns the loss, accuracy and area under the curve of a fixed model on some examples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 4)).astype(np.float32)
    y = (x.sum(axis=1) + rng.normal(size=examples) > 0).astype(np.int32)
    dataset = dx.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    with strategy.scope():
        w = dx.Variable(jnp.ones(4))
        loss = dx.metrics.Mean()
        accuracy, auc = dx.metrics.BinaryAccuracy(), dx.metrics.AUC()

    def replica_step(x: jax.Array, y: jax.Array) -> None:
        logits = x @ w
        loss.update_state(optax.sigmoid_binary_cross_entropy(logits, y))
        accuracy.update_state(y, jax.nn.sigmoid(logits))
        auc.update_state(y, jax.nn.sigmoid(logits))

    @dx.function
    def test_step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset):
        test_step(batch)
    # A second program, for the sizes of the last batch; all others share the first.
    print(f"{examples} examples, {test_step.trace_count} compiled steps")
    return [float(loss.result()), float(accuracy.result()), float(auc.result())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--examples", type=int, default=1_003)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    loss, accuracy, auc = train(strategy, options.examples)
    print(f"loss {loss:.4f}, accuracy {accuracy:.4f}, area under the curve {auc:.4f}")


if __name__ == "__main__":
    main()

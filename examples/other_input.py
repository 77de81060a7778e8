"""Feeds a strategy from other libraries: tf.data, torch, Grain, and plain Python.

    python examples/other_input.py --source torch

The sources are written as in the guides of these libraries; each yields global batches, which
`experimental_distribute_dataset` splits. The same rows come from all of them, so that the sums that
are printed are the same. tf.data and torch are needed only if you ask for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import distribax as dx

ROWS = np.arange(60, dtype=np.float32).reshape(20, 3)
BATCH = 8


def from_dx() -> Any:
    return dx.data.Dataset.from_tensor_slices(ROWS).batch(BATCH)


def from_python() -> Iterator[np.ndarray]:
    for start in range(0, len(ROWS), BATCH):
        yield ROWS[start : start + BATCH]


def from_grain() -> Any:
    import grain

    return grain.MapDataset.source(ROWS).batch(BATCH).to_iter_dataset()


def from_torch() -> Any:
    import torch.utils.data

    return torch.utils.data.DataLoader(torch.from_numpy(ROWS), batch_size=BATCH)


def from_tf_data() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(ROWS).batch(BATCH)


SOURCES = {
    "dx": from_dx,
    "python": from_python,
    "grain": from_grain,
    "torch": from_torch,
    "tf.data": from_tf_data,
}


def add_up(strategy: dx.Strategy, source: Any) -> list[float]:
    """Returns the sum of each batch, computed by all replicas."""

    @dx.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)

    return [float(step(batch)) for batch in strategy.experimental_distribute_dataset(source)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--source", choices=SOURCES, default="grain")
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    print(f"{options.source}: {add_up(strategy, SOURCES[options.source]())}")


if __name__ == "__main__":
    main()

"""A training loop on distribax, fed by one batch that stays, or by a distributed data set.

The difference of the two is what the loop loses to its input. The step is the MLP's, or a mere
wait, which stands for an accelerator that leaves the host's cores free.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import distribax as dx
from benchmarks.sides import input_problem, mlp_problem
from benchmarks.sides.mlp_shard_map import AXIS, make_mesh, make_step
from benchmarks.sides.serve import serve


def make_mlp_step(replicas: int) -> Any:
    """The hand-written step, so that this measures the input and nothing else."""
    mesh = make_mesh(replicas)
    optimizer = optax.adam(mlp_problem.RATE)
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(mlp_problem.make(replicas).weights, whole)
    state = jax.device_put(optimizer.init(weights), whole)
    compiled = make_step(mesh, optimizer)
    split = NamedSharding(mesh, PartitionSpec(AXIS))

    def step(batch: Any) -> jax.Array:
        nonlocal weights, state
        images, labels = jax.device_put(batch, split)  # nothing to do when they are placed already
        weights, state, loss = compiled(weights, state, images, labels)
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=input_problem.BATCH_SIZE)
    parser.add_argument("--feed", choices=("fixed", "dataset"), default="dataset")
    parser.add_argument("--step", choices=("mlp", "wait"), default="mlp")
    parser.add_argument("--wait", type=float, default=0.005, help="seconds of the step 'wait'")
    options = parser.parse_args()
    step = make_mlp_step(options.replicas) if options.step == "mlp" else None
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    dataset = dx.data.Dataset.from_tensor_slices(input_problem.in_memory())
    batched = dataset.shuffle(input_problem.NUM_IMAGES).batch(
        options.batch_size, drop_remainder=True
    )
    distributed = strategy.experimental_distribute_dataset(batched)

    def epochs() -> Iterator[Any]:
        while True:
            yield from distributed

    batches = epochs() if options.feed == "dataset" else repeat(next(iter(distributed)))

    def run(steps: int) -> None:
        loss = None
        for _ in range(steps):
            batch = next(batches)
            if step is None:
                jax.block_until_ready(batch)
                time.sleep(options.wait)
            else:
                loss = step(batch)
        jax.block_until_ready(loss)

    serve(run, {"library": f"jax {jax.__version__}"})


if __name__ == "__main__":
    main()

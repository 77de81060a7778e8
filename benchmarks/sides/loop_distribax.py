"""A training loop on distribax, over batches on the devices, or fed by a distributed data set.

The difference of the two is what the loop loses to its input. The batches that are there already
are many, so that neither loop finds its batch in the processor's cache. The step is the MLP's, or a
small one and a wait, which stands for an accelerator that leaves the host's cores free.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import input_problem
import jax
import mlp_problem
from mlp_distribax import make_step
from serve import serve

import distribax as dx

NUM_RESIDENT = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=input_problem.BATCH_SIZE)
    parser.add_argument("--feed", choices=("resident", "dataset"), default="dataset")
    parser.add_argument("--step", choices=("mlp", "wait"), default="mlp")
    parser.add_argument("--wait", type=float, default=0.005, help="seconds of the step 'wait'")
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size)
    train_step, variables = make_step(strategy, problem, options.batch_size)
    dataset = dx.data.Dataset.from_tensor_slices(input_problem.in_memory())
    batched = dataset.shuffle(input_problem.NUM_IMAGES).batch(
        options.batch_size, drop_remainder=True
    )
    distributed = strategy.experimental_distribute_dataset(batched)

    def epochs() -> Iterator[Any]:
        while True:
            yield from distributed

    batches = epochs()
    if options.feed == "resident":
        batches = cycle(list(islice(batches, NUM_RESIDENT)))

    @dx.function
    def light_step(images: Any, labels: Any) -> Any:
        return strategy.run(lambda images, labels: (images[0, 0], labels[0]), args=(images, labels))

    def run(steps: int) -> None:
        for _ in range(steps):
            images, labels = next(batches)
            if options.step == "mlp":
                train_step(images, labels)
            else:
                light_step(images, labels)
                time.sleep(options.wait)
        jax.block_until_ready([variable.value() for variable in variables])

    serve(run)


if __name__ == "__main__":
    main()

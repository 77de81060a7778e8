"""A compiled strategy.run with six small variables: what a call of dx.function costs the host."""

from __future__ import annotations

import argparse

import jax
import numpy as np
from placing import place
from serve import serve

import distribax as dx
from benchmarks.sides.call_shard_map import NUM_VARIABLES, RATE, SHAPE, time_calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    with strategy.scope():
        variables = [
            dx.Variable(np.ones(SHAPE, np.float32), aggregation=dx.VariableAggregation.MEAN)
            for _ in range(NUM_VARIABLES)
        ]
    inputs = place(strategy, np.ones((2 * options.replicas, *SHAPE), np.float32))

    def replica_step(inputs: jax.Array) -> jax.Array:
        total = inputs.sum()
        for variable in variables:
            variable.assign_sub(RATE * variable * total)
        return total

    @dx.function
    def step(inputs: jax.Array) -> jax.Array:
        totals = strategy.run(replica_step, args=(inputs,))
        return strategy.reduce(dx.ReduceOp.SUM, totals, axis=None)

    def call() -> jax.Array:
        return step(inputs)

    serve(lambda steps: time_calls(call, steps))


if __name__ == "__main__":
    main()

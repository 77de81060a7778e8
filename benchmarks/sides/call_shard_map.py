"""A bare jitted call with six small donated arrays: what a call costs the host at the least."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mlp_shard_map import AXIS, make_mesh
from serve import serve

NUM_VARIABLES = 6
SHAPE = (8,)
RATE = 0.01


def time_calls(call: Callable[[], Any], steps: int) -> dict[str, float]:
    """The calling thread's processor time a call.

    By the clock, the devices of a program on all cores would count for both sides: they compute
    while the call still prepares what it returns.
    """
    samples = []
    for _ in range(steps):
        start = time.thread_time()
        result = call()
        samples.append(time.thread_time() - start)
        jax.block_until_ready(result)
    return {"seconds": median(samples) * steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    mesh = make_mesh(options.replicas)
    whole, split = PartitionSpec(), PartitionSpec(AXIS)
    arrays = jax.device_put(
        [np.ones(SHAPE, np.float32)] * NUM_VARIABLES, NamedSharding(mesh, whole)
    )
    inputs = jax.device_put(
        np.ones((2 * options.replicas, *SHAPE), np.float32), NamedSharding(mesh, split)
    )

    def replica_step(arrays: list[jax.Array], inputs: jax.Array) -> Any:
        total = inputs.sum()
        arrays = [array - RATE * jax.lax.pmean(array * total, AXIS) for array in arrays]
        return arrays, jax.lax.psum(total, AXIS)

    step = jax.jit(
        jax.shard_map(replica_step, mesh=mesh, in_specs=(whole, split), out_specs=(whole, whole)),
        donate_argnums=0,
    )

    def call() -> jax.Array:
        nonlocal arrays
        arrays, total = step(arrays, inputs)
        return total

    serve(lambda steps: time_calls(call, steps))


if __name__ == "__main__":
    main()

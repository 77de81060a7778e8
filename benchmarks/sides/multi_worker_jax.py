"""The training step as an expert writes it by hand for several processes, on jax.distributed."""

from __future__ import annotations

import jax
import mlp_problem
import multi_worker_crew
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from mlp_shard_map import AXIS, make_step


def main() -> None:
    options, crew = multi_worker_crew.join(mlp_problem.parser())
    jax.distributed.initialize(crew.addresses[0], crew.size, crew.rank)
    mesh = jax.make_mesh((crew.size,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    problem = mlp_problem.make(options.batch_size)
    optimizer = optax.adam(mlp_problem.RATE)
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(problem.weights, whole)
    state = jax.jit(optimizer.init, out_shardings=whole)(weights)
    split = NamedSharding(mesh, PartitionSpec(AXIS))

    def piece(values: np.ndarray) -> jax.Array:
        own = np.split(values, crew.size)[crew.rank]
        return jax.make_array_from_process_local_data(split, own)

    images, labels = piece(problem.images), piece(problem.labels)
    step = make_step(mesh, optimizer)

    def run(steps: int) -> dict[str, float]:
        nonlocal weights, state
        loss = None
        for _ in range(steps):
            weights, state, loss = step(weights, state, images, labels)
        jax.block_until_ready((weights, loss))
        return {} if loss is None else {"loss": float(loss)}

    crew.serve(run)


if __name__ == "__main__":
    main()

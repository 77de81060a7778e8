"""The training step of the convolutional network by hand: jax.shard_map, jax.jit, donated state."""

from __future__ import annotations

from typing import Any

import convnet_problem
import jax
import jax.numpy as jnp
import mlp_problem
import mlp_shard_map
import optax
from jax.sharding import NamedSharding, PartitionSpec
from serve import serve


def loss_of(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = images
    for kernel, bias in weights[:-1]:
        hidden = jax.lax.conv_general_dilated(
            hidden, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        hidden = jax.nn.relu(hidden + bias)
        size = (1, 2, 2, 1)
        hidden = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, size, size, "VALID")
    kernel, bias = weights[-1]
    logits = hidden.reshape(len(hidden), -1) @ kernel + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    options = mlp_problem.parser().parse_args()
    mesh = mlp_shard_map.make_mesh(options.replicas)
    problem = convnet_problem.make(options.batch_size)
    optimizer = optax.adam(convnet_problem.RATE)
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(jax.tree.map(jnp.asarray, problem.weights), whole)
    state = jax.device_put(optimizer.init(weights), whole)
    images, labels = jax.device_put(
        (problem.images, problem.labels),
        NamedSharding(mesh, PartitionSpec(mlp_shard_map.AXIS)),
    )
    step = mlp_shard_map.make_step(mesh, optimizer, loss_of)

    def run(steps: int) -> dict[str, float]:
        nonlocal weights, state
        loss = None
        for _ in range(steps):
            weights, state, loss = step(weights, state, images, labels)
        jax.block_until_ready((weights, loss))
        return {} if loss is None else {"loss": float(loss)}

    serve(run)


if __name__ == "__main__":
    main()

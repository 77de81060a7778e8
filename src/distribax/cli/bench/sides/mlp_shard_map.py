"""The training step as an expert writes it by hand: jax.shard_map, jax.jit, donated state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mlp_problem
import optax
from jax.sharding import NamedSharding, PartitionSpec
from serve import serve

AXIS = "replica"


def loss_of(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = images
    for kernel, bias in weights[:-1]:
        hidden = jax.nn.relu(hidden @ kernel + bias)
    kernel, bias = weights[-1]
    logits = hidden @ kernel + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(
    mesh: jax.sharding.Mesh,
    optimizer: optax.GradientTransformation,
    loss_of: Callable[..., jax.Array] = loss_of,
) -> Any:
    def replica_step(weights: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        # Explicitly varying: the gradients then are the replica's own, and summed once, here.
        local = jax.lax.pcast(weights, AXIS, to="varying")
        loss, gradients = jax.value_and_grad(loss_of)(local, images, labels)
        loss, gradients = jax.lax.pmean((loss, gradients), AXIS)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    whole, split = PartitionSpec(), PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(whole, whole, split, split),
            out_specs=(whole, whole, whole),
        ),
        donate_argnums=(0, 1),
    )


def make_mesh(replicas: int) -> jax.sharding.Mesh:
    jax.config.update("jax_num_cpu_devices", replicas)
    return jax.make_mesh((replicas,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def main() -> None:
    options = mlp_problem.parser().parse_args()
    mesh = make_mesh(options.replicas)
    problem = mlp_problem.make(options.batch_size)
    optimizer = optax.adam(mlp_problem.RATE)
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(jax.tree.map(jnp.asarray, problem.weights), whole)
    state = jax.device_put(optimizer.init(weights), whole)
    images, labels = jax.device_put(
        (problem.images, problem.labels), NamedSharding(mesh, PartitionSpec(AXIS))
    )
    step = make_step(mesh, optimizer)

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

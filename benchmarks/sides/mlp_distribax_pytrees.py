"""The training step with distribax in the JAX way: pytrees of weights go in and come out."""

from __future__ import annotations

from typing import Any

import jax
import mlp_problem
import optax
from mlp_shard_map import loss_of
from placing import place
from serve import serve

import distribax as dx


def main() -> None:
    options = mlp_problem.parser().parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size)
    optimizer = optax.adam(mlp_problem.RATE)
    # A copy for each replica from the start, as the step returns it: one signature.
    weights, state = strategy.experimental_distribute_values_from_function(
        lambda _: (problem.weights, optimizer.init(problem.weights))
    )
    images, labels = place(strategy, problem.images), place(strategy, problem.labels)

    def replica_step(weights: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, images, labels)
        context = dx.get_replica_context()
        loss, gradients = context.all_reduce(dx.ReduceOp.MEAN, (loss, gradients))
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    @dx.function(donate_argnums=(0, 1))
    def train_step(weights: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        return strategy.run(replica_step, args=(weights, state, images, labels))

    def run(steps: int) -> dict[str, float]:
        nonlocal weights, state
        loss = None
        for _ in range(steps):
            weights, state, loss = train_step(weights, state, images, labels)
        jax.block_until_ready(strategy.experimental_local_results((weights, loss)))
        return {} if loss is None else {"loss": float(loss)}

    serve(run)


if __name__ == "__main__":
    main()

"""distribax's ParameterServerStrategy: a coordinator, workers and servers, each a process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import mlp_problem
import optax
import ps_problem
from serve import claim_output, serve

import distribax as dx

Work = tuple[Callable[[], Any], Callable[[], ps_problem.Figures]]
"""Schedules one function; and returns figures that show what was done."""


def mlp(coordinator: dx.coordinator.ClusterCoordinator, options: argparse.Namespace) -> Work:
    """Training of the MLP."""
    strategy = coordinator.strategy
    problem = mlp_problem.make(ps_problem.BATCH_SIZE)
    with strategy.scope():
        layers = [(dx.Variable(kernel), dx.Variable(bias)) for kernel, bias in problem.weights]
        variables = [variable for layer in layers for variable in layer]
        optimizer = dx.Optimizer(optax.sgd(ps_problem.RATE))

    def loss_of(images: Any, labels: Any) -> Any:
        hidden = images
        for kernel, bias in layers[:-1]:
            hidden = jax.nn.relu(hidden @ kernel + bias)
        kernel, bias = layers[-1]
        logits = hidden @ kernel + bias
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def replica_step(images: Any, labels: Any) -> Any:
        loss, gradients = dx.value_and_grad(loss_of, variables)(images, labels)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @dx.function
    def step(iterator: Any) -> Any:
        images, labels = next(iterator)
        return strategy.run(replica_step, args=(images, labels))

    def data() -> Any:
        return dx.data.Dataset.from_tensor_slices(ps_problem.batches(0)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(data))
    images, labels = ps_problem.batches(0)

    def figures() -> ps_problem.Figures:
        return {"loss": float(loss_of(images[0], labels[0]))}

    return lambda: coordinator.schedule(step, args=(iterator,)), figures


def trivial(coordinator: dx.coordinator.ClusterCoordinator, options: argparse.Namespace) -> Work:
    """Functions that only return a number."""

    def nothing() -> Any:
        return 1

    @dx.function
    def compiled() -> Any:
        return jax.numpy.asarray(1)

    function = compiled if options.way == "compiled" else nothing
    return lambda: coordinator.schedule(function), dict


def embedding(coordinator: dx.coordinator.ClusterCoordinator, options: argparse.Namespace) -> Work:
    """Lookups in a divided table, and updates of the rows found."""
    strategy = coordinator.strategy
    with strategy.scope():
        table = dx.Variable(ps_problem.table(options.rows))
        optimizer = dx.Optimizer(optax.sgd(ps_problem.RATE))

    def loss_of(indices: Any) -> Any:
        return (dx.embedding_lookup(table, indices) ** 2).sum() / 2

    def replica_step(indices: Any) -> Any:
        loss, gradients = dx.value_and_grad(loss_of, [table])(indices)
        optimizer.apply_gradients(zip(gradients, [table], strict=True))
        return loss

    @dx.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    def data() -> Any:
        return dx.data.Dataset.from_tensor_slices(ps_problem.indices(options.rows, 0)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(data))

    looked_up = ps_problem.indices(options.rows, 0)[0]

    def figures() -> ps_problem.Figures:
        return {"mean": float(dx.embedding_lookup(table, looked_up).mean())}

    return lambda: coordinator.schedule(step, args=(iterator,)), figures


WORKS = {"mlp": mlp, "trivial": trivial, "embedding": embedding}


def main() -> None:
    parser = ps_problem.parser()
    parser.add_argument("--way", choices=("python", "compiled"), default="python")
    options = parser.parse_args()
    answers = claim_output()
    servers = ps_problem.num_servers(options.work)
    partitioner = dx.partitioners.FixedShardsPartitioner(servers) if servers > 1 else None
    strategy = dx.ParameterServerStrategy(
        None, partitioner, num_workers=ps_problem.NUM_WORKERS, num_ps=servers
    )
    try:
        coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
        schedule, figures = WORKS[options.work](coordinator, options)
        run = ps_problem.runner(schedule, coordinator.join, figures)
        serve(run, answers)
    finally:
        strategy.close()


if __name__ == "__main__":
    main()

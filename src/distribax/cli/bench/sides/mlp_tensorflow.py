"""The training step with TensorFlow's MirroredStrategy on logical CPUs."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportArgumentType=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mlp_problem
import tensorflow as tf
from serve import serve


class RawAdam:
    """Adam on TensorFlow's fused kernel, without Keras: the least it can do for a step."""

    def __init__(self, variables: list[Any]) -> None:
        self._moments = [
            (tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables
        ]
        self._powers = [
            tf.Variable(beta, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
            for beta in (0.9, 0.999)
        ]

    def apply_gradients(self, pairs: Any) -> None:
        gradients, variables = zip(*pairs, strict=True)
        tf.distribute.get_replica_context().merge_call(self._apply, args=(gradients, variables))

    def _apply(self, strategy: Any, gradients: Any, variables: Any) -> None:
        sums = strategy.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, list(zip(gradients, variables, strict=True))
        )
        for value, variable, (first, second) in zip(sums, variables, self._moments, strict=True):
            strategy.extended.update(variable, _adam, args=(first, second, *self._powers, value))
        for power, beta in zip(self._powers, (0.9, 0.999), strict=True):
            strategy.extended.update(
                power, lambda copy, beta: copy.assign(copy * beta), args=(beta,)
            )


def _adam(variable: Any, first: Any, second: Any, power1: Any, power2: Any, gradient: Any) -> None:
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=first.handle,
        v=second.handle,
        beta1_power=power1.read_value(),
        beta2_power=power2.read_value(),
        lr=mlp_problem.RATE,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        grad=gradient,
    )


def make_model(problem: mlp_problem.Problem, kind: str) -> tuple[Any, list[Any]]:
    """A function from images to logits, and its variables: Keras layers, or bare variables."""
    if kind == "keras":
        sizes = [problem.images.shape[1], *(len(bias) for _, bias in problem.weights)]
        layers = [tf.keras.layers.Dense(size, "relu") for size in sizes[1:-1]]
        model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(sizes[-1])])
        model.build((None, sizes[0]))
        model.set_weights([value for layer in problem.weights for value in layer])
        return model, model.trainable_variables
    layers = [(tf.Variable(kernel), tf.Variable(bias)) for kernel, bias in problem.weights]

    def logits_of(images: Any) -> Any:
        hidden = images
        for kernel, bias in layers[:-1]:
            hidden = tf.nn.relu(hidden @ kernel + bias)
        kernel, bias = layers[-1]
        return hidden @ kernel + bias

    return logits_of, [variable for layer in layers for variable in layer]


def make_step(strategy: Any, problem: mlp_problem.Problem, options: argparse.Namespace) -> Any:
    """The step from a batch to its loss, compiled unless `options.eager`."""
    with strategy.scope():
        model, variables = make_model(problem, options.model)
        if options.optimizer == "keras":
            optimizer: Any = tf.keras.optimizers.Adam(mlp_problem.RATE, epsilon=1e-8)
            optimizer.build(variables)
        else:
            optimizer = RawAdam(variables)

    def gradients_of(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=options.batch_size)
        return loss, tape.gradient(loss, variables)

    if options.jit_compile:
        gradients_of = tf.function(gradients_of, jit_compile=True)

    def replica_step(images: Any, labels: Any) -> Any:
        loss, gradients = gradients_of(images, labels)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def train_step(images: Any, labels: Any) -> Any:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return train_step if options.eager else tf.function(train_step)


def place(strategy: Any, values: Any) -> Any:
    """Give each replica its share of `values`; the last may have less."""
    share = -(-len(values) // strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group * share :][:share])
    )


def make_run(train_step: Any, images: Any, labels: Any) -> Callable[[int], dict[str, float]]:
    def run(steps: int) -> dict[str, float]:
        loss = None
        for _ in range(steps):
            loss = train_step(images, labels)
        return {} if loss is None else {"loss": float(loss.numpy())}

    return run


def parser() -> argparse.ArgumentParser:
    result = mlp_problem.parser()
    result.add_argument("--model", choices=("keras", "variables"), default="keras")
    result.add_argument("--optimizer", choices=("keras", "raw"), default="keras")
    result.add_argument("--jit-compile", action="store_true", help="compile the gradients by XLA")
    return result


def main() -> None:
    options = parser().parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * options.replicas,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size, options.layers)
    train_step = make_step(strategy, problem, options)
    images, labels = place(strategy, problem.images), place(strategy, problem.labels)
    run = make_run(train_step, images, labels)
    serve(run)


if __name__ == "__main__":
    main()

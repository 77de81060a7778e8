"""Keras's `fit`: under a strategy, under Keras's own DataParallel, or on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import convnet_problem
import mlp_problem
from serve import serve

import distribax as dx

# After distribax, so that JAX is its backend.
import keras  # isort: skip


def make_mlp(problem: mlp_problem.Problem) -> keras.Model:
    """Returns the MLP of the problem."""
    sizes = [kernel.shape[1] for kernel, _ in problem.weights]
    layers = [keras.layers.Dense(size, "relu") for size in sizes[:-1]]
    rows = problem.weights[0][0].shape[0]
    return keras.Sequential([keras.Input((rows,)), *layers, keras.layers.Dense(sizes[-1])])


def make_convnet(problem: convnet_problem.Problem) -> keras.Model:
    """Returns the convolutional network of the problem."""
    layers = [keras.Input(convnet_problem.IMAGE)]
    for count in convnet_problem.FILTERS:
        layers += [keras.layers.Conv2D(count, 3, activation="relu"), keras.layers.MaxPooling2D(2)]
    dense = keras.layers.Dense(convnet_problem.NUM_CLASSES)
    return keras.Sequential([*layers, keras.layers.Flatten(), dense])


def compile_model(model: keras.Model, problem: Any) -> None:
    """Compiles a model, and gives it the weights of its problem."""
    model.set_weights([array for pair in problem.weights for array in pair])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(mlp_problem.RATE), loss)


def main() -> None:
    parser = mlp_problem.parser()
    parser.add_argument("--under", choices=["mirrored", "one_device", "data_parallel", "nothing"])
    parser.add_argument("--model", choices=["mlp", "convnet"], default="mlp")
    options = parser.parse_args()
    dx.set_virtual_cpu_devices(options.replicas)
    names = [f"CPU:{index}" for index in range(options.replicas)]
    problem: Any = convnet_problem.make(options.batch_size)
    if options.model == "mlp":
        problem = mlp_problem.make(options.batch_size, options.layers)
    scope: Any = contextlib.nullcontext()
    if options.under == "mirrored":
        scope = dx.MirroredStrategy(names).scope()
    elif options.under == "one_device":
        scope = dx.OneDeviceStrategy(names[0]).scope()
    elif options.under == "data_parallel":
        devices = [name.lower() for name in names]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    with scope:
        model = make_mlp(problem) if options.model == "mlp" else make_convnet(problem)
        compile_model(model, problem)

    def repeat() -> Iterator[Any]:
        while True:
            yield problem.images, problem.labels

    def run(steps: int) -> dict[str, float]:
        if steps:
            model.fit(repeat(), steps_per_epoch=steps, shuffle=False, verbose=0)
        return {}

    serve(run)


if __name__ == "__main__":
    main()

"""Keras's `fit` of the MLP under TensorFlow's MirroredStrategy on logical CPUs."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import mlp_problem
import tensorflow as tf
from serve import serve


def main() -> None:
    options = mlp_problem.parser().parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * options.replicas,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    problem = mlp_problem.make(options.batch_size, options.layers)
    sizes = [kernel.shape[1] for kernel, _ in problem.weights]
    with strategy.scope():
        layers = [tf.keras.layers.Dense(size, "relu") for size in sizes[:-1]]
        inputs = tf.keras.Input((problem.images.shape[1],))
        model = tf.keras.Sequential([inputs, *layers, tf.keras.layers.Dense(sizes[-1])])
        model.set_weights([array for pair in problem.weights for array in pair])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(mlp_problem.RATE), loss)
    data = tf.data.Dataset.from_tensors((problem.images, problem.labels)).repeat()

    def run(steps: int) -> dict[str, float]:
        if steps:
            model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)
        return {}

    serve(run)


if __name__ == "__main__":
    main()

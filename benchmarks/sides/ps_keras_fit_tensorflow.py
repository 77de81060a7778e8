"""`fit` of tf_keras (Keras 2) with TensorFlow's ParameterServerStrategy: Keras 3 has none."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

import os
from typing import Any

import mlp_problem
import ps_problem
import ps_tensorflow
import tensorflow as tf
import tf_keras
from serve import claim_output, serve


def make_data(context: Any) -> Any:
    """Returns the batches of a worker."""
    return tf.data.Dataset.from_tensor_slices(ps_problem.batches(0)).repeat()


def main() -> None:
    answers = claim_output()
    strategy, others = ps_tensorflow.start_cluster(num_servers=1)
    problem = mlp_problem.make(ps_problem.BATCH_SIZE)
    with strategy.scope():
        sizes = [kernel.shape[1] for kernel, _ in problem.weights]
        layers = [tf_keras.layers.Dense(size, "relu") for size in sizes[:-1]]
        model = tf_keras.Sequential([*layers, tf_keras.layers.Dense(sizes[-1])])
        model.build((None, problem.images.shape[1]))
        model.set_weights([array for pair in problem.weights for array in pair])
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(ps_problem.RATE), loss)
    creator = tf_keras.utils.experimental.DatasetCreator(make_data)

    def run(steps: int) -> dict[str, float]:
        fitted = model.fit(creator, steps_per_epoch=steps, verbose=0)
        return {"loss": float(fitted.history["loss"][-1])}

    serve(run, answers)
    ps_tensorflow.end_cluster(others)
    # At the end of the interpreter, the coordinator's threads would look for the workers.
    os._exit(0)


if __name__ == "__main__":
    main()

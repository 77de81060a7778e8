"""Keras's `fit` of the MLP with distribax's ParameterServerStrategy."""

from __future__ import annotations

from typing import Any

import mlp_problem
import ps_problem
from serve import claim_output, serve

import distribax as dx

# After distribax, so that JAX is its backend.
import keras  # isort: skip

from distribax.integrations.keras import DatasetCreator


def make_data(context: dx.InputContext) -> Any:
    """Returns the batches of a worker."""
    return dx.data.Dataset.from_tensor_slices(ps_problem.batches(0)).repeat()


def main() -> None:
    answers = claim_output()
    problem = mlp_problem.make(ps_problem.BATCH_SIZE)
    strategy = dx.ParameterServerStrategy(num_workers=ps_problem.NUM_WORKERS, num_ps=1)
    try:
        with strategy.scope():
            sizes = [kernel.shape[1] for kernel, _ in problem.weights]
            layers = [keras.layers.Dense(size, "relu") for size in sizes[:-1]]
            rows = problem.weights[0][0].shape[0]
            model = keras.Sequential([keras.Input((rows,)), *layers, keras.layers.Dense(sizes[-1])])
            model.set_weights([array for pair in problem.weights for array in pair])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(ps_problem.RATE), loss)
        creator = DatasetCreator(make_data)

        def run(steps: int) -> dict[str, float]:
            fitted = model.fit(creator, steps_per_epoch=steps, verbose=0)
            return {"loss": float(fitted.history["loss"][-1])}

        serve(run, answers)
    finally:
        strategy.close()


if __name__ == "__main__":
    main()

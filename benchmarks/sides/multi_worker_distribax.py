"""The training step with distribax: MultiWorkerMirroredStrategy, dx.function and dx.Variable."""

from __future__ import annotations

import os
from typing import Any

import jax
import mlp_problem
import multi_worker_crew
import numpy as np
from mlp_distribax import make_step

import distribax as dx


def main() -> None:
    options, crew = multi_worker_crew.join(mlp_problem.parser())
    os.environ["TF_CONFIG"] = crew.tf_config
    strategy = dx.MultiWorkerMirroredStrategy()
    problem = mlp_problem.make(options.batch_size)
    train_step, variables = make_step(strategy, problem, options.batch_size)

    def piece(values: np.ndarray) -> Any:
        own = np.split(values, crew.size)[crew.rank]
        return strategy.experimental_distribute_values_from_function(lambda _: own)

    images, labels = piece(problem.images), piece(problem.labels)

    def run(steps: int) -> dict[str, float]:
        loss = None
        for _ in range(steps):
            loss = train_step(images, labels)
        jax.block_until_ready([variable.value() for variable in variables])
        return {} if loss is None else {"loss": float(loss)}

    crew.serve(run)


if __name__ == "__main__":
    main()

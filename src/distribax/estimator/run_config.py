"""`RunConfig`: how and where an Estimator runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from distribax.strategies import Strategy
from distribax.types import ReduceOp

StrategyOrMaker: TypeAlias = Strategy | Callable[[], Strategy]
"""A strategy, or a function that makes it when it is needed."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How an Estimator is distributed, and how often it saves and reports.

    Attributes:
        model_dir: Where checkpoints and summaries go, if the Estimator is not told.
        train_distribute: The strategy that trains, or a function that makes it on first use (tasks
            that do not train, such as an evaluator, then never make it); None uses one device.
        eval_distribute: The same for `evaluate`; any strategy but one with parameter servers.
        tf_random_seed: A seed for the model function: `config.tf_random_seed`.
        save_checkpoints_steps: The number of steps between two checkpoints.
        save_checkpoints_secs: The seconds between two checkpoints; 600 if neither is given.
        keep_checkpoint_max: How many checkpoints are kept; None keeps all.
        save_summary_steps: The number of steps between two losses in TensorBoard.
        log_step_count_steps: The number of steps between two logs of the loss and the speed.
        loss_reduction: How the losses of the replicas make the one that is reported: SUM for losses
            made with `dx.compute_average_loss`, MEAN for those that are means of a replica's batch.
            It should be the same as the `reduce_op` of the optimizer.
    """

    model_dir: str | os.PathLike[str] | None = None
    train_distribute: StrategyOrMaker | None = None
    eval_distribute: StrategyOrMaker | None = None
    tf_random_seed: int = 1
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    save_summary_steps: int = 100
    log_step_count_steps: int = 100
    loss_reduction: ReduceOp | str = ReduceOp.SUM

    def __post_init__(self) -> None:
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ValueError(
                f"RunConfig: save_checkpoints_steps={self.save_checkpoints_steps} and "
                f"save_checkpoints_secs={self.save_checkpoints_secs} are both given. Give one."
            )
        for name, value in vars(self).items():
            if name.endswith(("_steps", "_secs")) and value is not None and not value > 0:
                raise ValueError(f"RunConfig: {name}={value} is not positive.")
        for name in ("train_distribute", "eval_distribute"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Strategy) and not callable(value):
                raise TypeError(
                    f"RunConfig: {name}={value!r} is neither a strategy nor a function that makes "
                    f"one. Pass for example {name}=dx.MirroredStrategy()."
                )
        ReduceOp.parse(self.loss_reduction, "loss_reduction")

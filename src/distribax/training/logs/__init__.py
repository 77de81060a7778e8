"""Where metrics go: TensorBoard's event files, and the loggers of others."""

from __future__ import annotations

from distribax.training.logs.metric_logger import MetricLogger as MetricLogger
from distribax.training.logs.tensorboard import TensorBoard as TensorBoard

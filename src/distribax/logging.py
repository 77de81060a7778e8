"""`dx.logging`: metrics for TensorBoard and other loggers."""

from distribax.coordinator.status_log import log_status as log_status
from distribax.training.logs import MetricLogger as MetricLogger
from distribax.training.logs import TensorBoard as TensorBoard

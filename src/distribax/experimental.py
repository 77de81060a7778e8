"""The names that TensorFlow keeps in `tf.distribute.experimental`; `dx.X` is their home."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distribax.collectives import CommunicationImplementation as CollectiveCommunication
from distribax.collectives import CommunicationImplementation as CommunicationImplementation
from distribax.collectives import CommunicationOptions as CollectiveHints
from distribax.collectives import CommunicationOptions as CommunicationOptions
from distribax.contrib.tensorflow_names import explain_missing
from distribax.strategies import CentralStorageStrategy as CentralStorageStrategy
from distribax.training.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from distribax.training.preemption import TerminationConfig as TerminationConfig
from distribax.types import ValueContext as ValueContext

if TYPE_CHECKING:
    from distribax import coordinator as coordinator
    from distribax import partitioners as partitioners
    from distribax.parameter_server.strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from distribax.strategies.multi_worker import (
        ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from distribax.strategies.tpu import TPUStrategy as TPUStrategy
    from distribax.training.moving_averages import (
        ExponentialMovingAverage as ExponentialMovingAverage,
    )
    from distribax.training.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ExponentialMovingAverage",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "SidecarEvaluator",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]


# Loaded on use, as in `distribax` itself.
_ON_USE = {
    "ExponentialMovingAverage": "distribax.training.moving_averages",
    "MultiWorkerMirroredStrategy": "distribax.strategies.multi_worker",
    "ParameterServerStrategy": "distribax.parameter_server.strategy",
    "SidecarEvaluator": "distribax.training.sidecar_evaluator",
    "TPUStrategy": "distribax.strategies.tpu",
    "coordinator": "distribax",
    "partitioners": "distribax",
}
_OTHER_NAMES = {"MultiWorkerMirroredStrategy": "ExperimentalMultiWorkerMirroredStrategy"}


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(explain_missing("distribax.experimental", name))
    return getattr(importlib.import_module(_ON_USE[name]), _OTHER_NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)

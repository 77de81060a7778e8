"""The names that TensorFlow keeps in `tf.distribute.experimental`; `dx.X` is their home."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distribax.collectives import CommunicationImplementation as CollectiveCommunication
from distribax.collectives import CommunicationImplementation as CommunicationImplementation
from distribax.collectives import CommunicationOptions as CommunicationOptions
from distribax.strategies import CentralStorageStrategy as CentralStorageStrategy
from distribax.training.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from distribax.training.preemption import TerminationConfig as TerminationConfig
from distribax.types import ValueContext as ValueContext

if TYPE_CHECKING:
    from distribax import coordinator as coordinator
    from distribax.parameter_server.strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from distribax.strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
]


# Loaded on use, as in `distribax` itself.
_ON_USE = {
    "MultiWorkerMirroredStrategy": "distribax.strategies.multi_worker",
    "ParameterServerStrategy": "distribax.parameter_server.strategy",
    "coordinator": "distribax.coordinator",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(f"module 'distribax.experimental' has no attribute {name!r}")
    module = importlib.import_module(_ON_USE[name])
    return module if name == "coordinator" else getattr(module, name)

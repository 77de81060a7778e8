"""The names that TensorFlow keeps in `tf.distribute.experimental`; `dx.X` is their home."""

from __future__ import annotations

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
    from distribax.strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
]


def __getattr__(name: str) -> Any:
    if name != "MultiWorkerMirroredStrategy":
        raise AttributeError(f"module 'distribax.experimental' has no attribute {name!r}")
    from distribax.strategies.multi_worker import MultiWorkerMirroredStrategy

    return MultiWorkerMirroredStrategy

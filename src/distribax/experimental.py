"""The names that TensorFlow keeps in `tf.distribute.experimental`; `dx.X` is their home."""

from __future__ import annotations

from distribax.collectives import CommunicationImplementation as CollectiveCommunication
from distribax.collectives import CommunicationImplementation as CommunicationImplementation
from distribax.collectives import CommunicationOptions as CommunicationOptions
from distribax.strategies import CentralStorageStrategy as CentralStorageStrategy
from distribax.types import ValueContext as ValueContext

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]

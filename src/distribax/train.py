"""The names that TensorFlow keeps in `tf.train`; `dx.X` is their home."""

from __future__ import annotations

from distribax.cluster import ClusterDef as ClusterDef
from distribax.cluster import ClusterSpec as ClusterSpec
from distribax.cluster import JobDef as JobDef
from distribax.cluster import Server as Server
from distribax.cluster import ServerDef as ServerDef
from distribax.training.checkpoint import Checkpoint as Checkpoint
from distribax.training.checkpoint_manager import CheckpointManager as CheckpointManager

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "ClusterDef",
    "ClusterSpec",
    "JobDef",
    "Server",
    "ServerDef",
]

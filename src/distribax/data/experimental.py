"""Names that tf.data.experimental also has."""

from __future__ import annotations

from distribax.data.dataset_options import (
    AUTOTUNE,
    SHARD_HINT,
    AutoShardPolicy,
    DistributeOptions,
    ThreadingOptions,
)
from distribax.data.plan.plan_node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "DistributeOptions",
    "ThreadingOptions",
]

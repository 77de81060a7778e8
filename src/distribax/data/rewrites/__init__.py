"""Pure rewrites of plans for distribution: the number of workers and the worker's id are inputs."""

from __future__ import annotations

from distribax.data.plan.pieces import SplitBatch as SplitBatch
from distribax.data.rewrites.autoshard import ShardDecision as ShardDecision
from distribax.data.rewrites.autoshard import auto_shard as auto_shard

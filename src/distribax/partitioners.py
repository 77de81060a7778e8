"""Partitioners, as `dx.partitioners`: into how many shards a large variable is divided."""

from distribax.variables.sharded.partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
)
from distribax.variables.sharded.partitioners import MaxSizePartitioner as MaxSizePartitioner
from distribax.variables.sharded.partitioners import MinSizePartitioner as MinSizePartitioner
from distribax.variables.sharded.partitioners import Partitioner as Partitioner

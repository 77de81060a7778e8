"""Partitioners, as `dx.partitioners`: into how many shards a large variable is divided."""

from distribax.variables.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from distribax.variables.partitioners import MaxSizePartitioner as MaxSizePartitioner
from distribax.variables.partitioners import MinSizePartitioner as MinSizePartitioner
from distribax.variables.partitioners import Partitioner as Partitioner

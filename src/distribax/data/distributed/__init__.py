"""Data sets that feed replicas: dividing, putting on devices, saving positions."""

from __future__ import annotations

from distribax.data.dataset import Dataset as Dataset
from distribax.data.distributed.distributed_dataset import DistributedDataset as DistributedDataset
from distribax.data.distributed.distributed_dataset import PerReplicaSpec as PerReplicaSpec
from distribax.data.distributed.distributed_dataset import distribute_dataset as distribute_dataset
from distribax.data.distributed.distributed_dataset import (
    distribute_from_function as distribute_from_function,
)
from distribax.data.distributed.distributed_iterator import (
    DistributedIterator as DistributedIterator,
)
from distribax.data.distributed.input_options import InputContext as InputContext
from distribax.data.distributed.input_options import InputOptions as InputOptions
from distribax.data.distributed.input_options import InputReplicationMode as InputReplicationMode
from distribax.data.numpy_rows import make_numpy_rows as make_numpy_rows

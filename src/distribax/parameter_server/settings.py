"""The settings of a parameter server, and checks of those that users pass to the strategy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.roles import TASK_TYPES

SERVER_LOST_SECONDS: Final = read_seconds("DISTRIBAX_SERVER_LOST_SECONDS", 300.0)
"""How long the coordinator, and work, waits for a parameter server that nobody can reach."""


@dataclass(frozen=True)
class ServerSettings:
    """What a parameter server needs to start, and to start again after its death.

    Attributes:
        index: The server's index.
        host: The address to listen on; None is that of its Ray node.
        token: The secret that clients have to know.
        strategy: The name of the strategy that it belongs to.
        folder: Where the strategy's servers keep their snapshots.
        snapshot_interval: How many seconds pass between two snapshots; None turns them off.
    """

    index: int
    host: str | None
    token: bytes
    strategy: str
    folder: str
    snapshot_interval: float | None

    @property
    def snapshot_dir(self) -> Path | None:
        """The server's own folder for snapshots, on its machine; None if it takes none."""
        if self.snapshot_interval is None:
            return None
        # The machine of the server may have its folder elsewhere, named by a variable.
        folder = Path(os.path.expandvars(self.folder))
        return folder / f"snapshots-{self.strategy[:8]}" / f"server-{self.index}"


@dataclass(frozen=True)
class RoundSettings:
    """How gradients of several workers become one update.

    Attributes:
        num_shares: How many gradients are averaged into one update; 1 applies each as it comes.
        timeout: How many seconds an update waits for late workers before it is applied without
            them; None waits for all.
    """

    num_shares: int = 1
    timeout: float | None = None


def check_cluster(resolver: object, num_workers: object, num_ps: object, address: object) -> None:
    """Raises if a `ParameterServerStrategy` cannot have such a cluster."""
    for name, count in (("num_workers", num_workers), ("num_ps", num_ps)):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"ParameterServerStrategy: {name}={count!r}. Expected a number of at least 1."
            )
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"ParameterServerStrategy: cluster_resolver={resolver!r}. Expected a resolver, for "
            "example dx.cluster_resolver.TFConfigClusterResolver(), or None. The number of workers "
            "and servers on this machine is given by name: num_workers=2, num_ps=1."
        )
    if resolver is not None:
        _check_jobs(resolver)
    if address is not None and not isinstance(address, str):
        raise TypeError(
            f"ParameterServerStrategy: address={address!r}. Expected the address of a Ray cluster, "
            "such as 'ray-head:6379' or 'auto'."
        )


def _check_jobs(resolver: ClusterResolver) -> None:
    """Raises if the cluster has jobs that nobody would ever run."""
    allowed = ", ".join(map(repr, TASK_TYPES))
    for job in resolver.cluster_spec().jobs:
        if job not in TASK_TYPES:
            raise ValueError(
                f"ParameterServerStrategy: the cluster has the job {job!r}. Expected only "
                f"{allowed}."
            )
    if resolver.task_type is not None and resolver.task_type not in TASK_TYPES:
        raise ValueError(
            f"ParameterServerStrategy: task_type={resolver.task_type!r} of cluster_resolver is no "
            f"job that it knows. Expected one of {allowed}."
        )


def check_settings(
    partitioner: object,
    snapshot_interval: object,
    snapshot_dir: object,
    server_timeout: object,
    synchronous: object,
    round_timeout: object,
) -> None:
    """Raises if an argument of a `ParameterServerStrategy` is wrong, before anything starts."""
    # A class is callable too, but an instance of it was meant.
    if partitioner is not None and (isinstance(partitioner, type) or not callable(partitioner)):
        raise TypeError(
            f"ParameterServerStrategy: variable_partitioner={partitioner!r} is not a partitioner. "
            "Expected a callable that is given shape and dtype, for example "
            "dx.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)."
        )
    seconds = {
        "snapshot_interval": (snapshot_interval, ", or None for no snapshots"),
        "server_timeout": (server_timeout, ""),
        "round_timeout": (round_timeout, ", or None to wait for all workers"),
    }
    for name, (value, or_none) in seconds.items():
        if value is None and or_none:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(
                f"ParameterServerStrategy: {name}={value!r}. Expected a positive number of "
                f"seconds{or_none}."
            )
    if snapshot_dir is not None and not isinstance(snapshot_dir, (str, os.PathLike)):
        raise TypeError(
            f"ParameterServerStrategy: snapshot_dir={snapshot_dir!r}. Expected the path of a "
            "folder, or None for one that is removed at the end."
        )
    if not isinstance(synchronous, bool):
        raise TypeError(
            f"ParameterServerStrategy: synchronous={synchronous!r}. Expected True or False."
        )
    if round_timeout is not None and not synchronous:
        raise ValueError(
            f"ParameterServerStrategy: round_timeout={round_timeout!r} without synchronous=True. "
            "Only a synchronous update waits for workers; drop it."
        )

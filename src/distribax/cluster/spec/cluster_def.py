"""Clusters and servers as TensorFlow's protocol buffers describe them, as plain objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass
class JobDef:
    """One job of a cluster.

    Args:
        name: The job's name.
        tasks: The address of each task, by its index.
    """

    name: str
    tasks: dict[int, str] = field(default_factory=dict)


@dataclass
class ClusterDef:
    """A cluster, like TensorFlow's `ClusterDef`.

    Args:
        job: The jobs.
    """

    job: list[JobDef] = field(default_factory=list)


@dataclass
class ServerDef:
    """One process of a cluster, like TensorFlow's `ServerDef`.

    Args:
        cluster: The cluster.
        job_name: The job of the process.
        task_index: The index of the process in its job.
        protocol: How the processes talk; "grpc".
    """

    cluster: ClusterDef
    job_name: str
    task_index: int = 0
    protocol: str = "grpc"


class _Job(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def tasks(self) -> Mapping[int, str]: ...


@runtime_checkable
class ClusterLike(Protocol):
    """What a `ClusterDef` has: ours, and a protocol buffer of that name."""

    @property
    def job(self) -> Sequence[_Job]: ...


@runtime_checkable
class ServerLike(Protocol):
    """What a `ServerDef` has: ours, and a protocol buffer of that name."""

    @property
    def cluster(self) -> ClusterLike: ...
    @property
    def job_name(self) -> str: ...
    @property
    def task_index(self) -> int: ...
    @property
    def protocol(self) -> str: ...

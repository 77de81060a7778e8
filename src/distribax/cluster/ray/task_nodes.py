"""The tasks of a cluster spec as nodes of one Ray cluster."""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
from typing import Final

from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.ray.node import ClusterJoinError
from distribax.cluster.ray.node_main import NodeSettings
from distribax.cluster.spec.cluster_spec import (
    ClusterSpec,
    name_task_field,
    parse_task_address,
)
from distribax.cluster.spec.host_address import find_ip_address, find_own_address, is_loopback
from distribax.cluster.spec.roles import list_tasks

JOIN_SECONDS: Final = read_seconds("DISTRIBAX_SERVER_JOIN_SECONDS", 600.0)
"""How long the tasks of a cluster wait for each other to start."""

REJOIN_SECONDS: Final = read_seconds("DISTRIBAX_SERVER_REJOIN_SECONDS", 300.0)
"""How long a task that has lost its cluster tries to join it again."""

LOOPBACK: Final = "127.0.0.1"
_SHARE: Final = 0.01
"""An actor's share of its node's resource, which only decides on which node the actor runs."""


def find_head_task(spec: ClusterSpec) -> tuple[str, int]:
    """Returns the task whose node is the head: the chief, or ps 0, or the first one.

    Raises:
        ValueError: The cluster has no tasks.

    >>> find_head_task(ClusterSpec({"worker": ["a:1"], "ps": ["b:1", "c:1"]}))
    ('ps', 0)
    """
    for job in ("chief", "ps", *spec.jobs):
        if job in spec.jobs and spec.task_indices(job):
            return job, spec.task_indices(job)[0]
    raise ValueError("cluster_spec has no tasks. Expected workers and parameter servers.")


def name_task(job: str, index: int) -> str:
    """Returns the name of the task for users, such as "worker 0"."""
    return f"{job} {index}"


def make_task_resource(job: str, index: int) -> dict[str, float]:
    """Returns the Ray resource that only the task's node has."""
    return {f"distribax:{job}:{index}": 1.0}


def make_actor_resource(job: str, index: int) -> dict[str, float]:
    """Returns the Ray resource that an actor asks for, so that it runs on the task's node."""
    return dict.fromkeys(make_task_resource(job, index), _SHARE)


def describe_task(spec: ClusterSpec, job: str, index: int) -> str:
    """Returns the name of the task with its address."""
    return f"{name_task(job, index)} ({spec.task_address(job, index)})"


def make_node_settings(
    spec: ClusterSpec, job: str, index: int, token: str, timeout: float
) -> NodeSettings:
    """Returns the settings of a task's node."""
    visitor = make_visitor_settings(spec, token, timeout)
    is_head = find_head_task(spec) == (job, index)
    return dataclasses.replace(
        visitor,
        task=name_task(job, index),
        host=find_task_host(spec, job, index),
        port=parse_task_address(spec, job, index).port or 0,
        head_address=None if is_head else visitor.head_address,
        resources=make_task_resource(job, index),
    )


def make_visitor_settings(spec: ClusterSpec, token: str, timeout: float) -> NodeSettings:
    """Returns the settings of the node of a coordinator that is not in the cluster spec."""
    head = find_head_task(spec)
    return NodeSettings(
        token=token,
        task="the coordinator",
        host=None,
        head=name_task(*head),
        head_address=str(parse_task_address(spec, *head)),
        spec=json.dumps(spec.as_dict(), sort_keys=True),
        timeout=timeout,
    )


def claim_address(settings: NodeSettings) -> socket.socket:
    """Binds a socket to the task's address, so that no other process can be the same task.

    Nobody connects to it: Ray's processes choose free ports of the same host, and only the head is
    found by its own port.

    Raises:
        ClusterJoinError: The address is in use, or not one of this machine.
    """
    host, port = settings.host, settings.port
    assert host is not None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claimed = socket.socket(family, socket.SOCK_STREAM)
    if settings.is_head:
        # Ray may have listened there before; its old connections must not be an obstacle.
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claimed.bind((host, port))
    except OSError as error:
        claimed.close()
        raise ClusterJoinError(_explain_failed_claim(settings, error)) from error
    return claimed


def _explain_failed_claim(settings: NodeSettings, error: OSError) -> str:
    where = f"{settings.task} cannot have its address {settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where}: it is in use. Another process is this task already, or another program has "
            "the port. Each task is one process: end the other one, or give this one its own "
            "task_index, or the cluster another port."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{where}: it is not an address of this machine. Start {settings.task} on the machine "
            "that the cluster spec names, or correct the cluster spec."
        )
    return f"{where}: {error}"


def is_local(spec: ClusterSpec) -> bool:
    """Returns whether all tasks are on this machine and can only be reached from it."""
    return all(is_loopback(find_ip_address(host)) for host in _list_hosts(spec))


def find_task_host(spec: ClusterSpec, job: str, index: int) -> str:
    """Returns the IP address of a task, as other tasks can reach it."""
    address = parse_task_address(spec, job, index)
    host = find_ip_address(address.host)
    if host is None:
        raise ClusterJoinError(
            f"{name_task_field(job, index)}={str(address)!r}: the host {address.host!r} is not "
            "known here. Check its name, or write its IP address."
        )
    if not is_loopback(host):
        return host
    own = find_own_address(address.host, _list_hosts(spec))
    return LOOPBACK if own is None or is_loopback(own) else own


def _list_hosts(spec: ClusterSpec) -> list[str]:
    return [parse_task_address(spec, *task).host for task in list_tasks(spec)]

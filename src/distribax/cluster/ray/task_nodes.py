"""How the tasks of a cluster spec become the nodes of one Ray cluster."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
from typing import Final

from distribax.cluster.ray.node import ClusterJoinError, NodeSettings
from distribax.cluster.spec.address import Address, parse_address
from distribax.cluster.spec.cluster_spec import ClusterSpec, name_task_field

LOOPBACK: Final = "127.0.0.1"
_SHARE: Final = 0.01
"""What an actor takes of its node's resource: it says where the actor is, not how much it needs."""


def head_task(spec: ClusterSpec) -> tuple[str, int]:
    """Returns the task whose node is the head: the chief, or ps 0, or the first there is.

    >>> head_task(ClusterSpec({"worker": ["a:1"], "ps": ["b:1", "c:1"]}))
    ('ps', 0)
    """
    for job in ("chief", "ps", *spec.jobs):
        if job in spec.jobs and spec.task_indices(job):
            return job, spec.task_indices(job)[0]
    raise ValueError("cluster_spec has no tasks. Expected workers and parameter servers.")


def task_name(job: str, index: int) -> str:
    """Returns the task in words."""
    return f"{job} {index}"


def task_resource(job: str, index: int) -> dict[str, float]:
    """Returns Ray's resource that only the task's node has."""
    return {f"distribax:{job}:{index}": 1.0}


def actor_resource(job: str, index: int) -> dict[str, float]:
    """Returns what an actor asks for to be placed on the task's node."""
    return dict.fromkeys(task_resource(job, index), _SHARE)


def described(spec: ClusterSpec, job: str, index: int) -> str:
    """Returns the task in words, with its address."""
    return f"{task_name(job, index)} ({spec.task_address(job, index)})"


def node_settings(
    spec: ClusterSpec, job: str, index: int, token: str, timeout: float
) -> NodeSettings:
    """Returns the settings of a task's node."""
    head = head_task(spec)
    return NodeSettings(
        token=token,
        task=task_name(job, index),
        host=task_host(spec, job, index),
        port=_address(spec, job, index).port or 0,
        head=task_name(*head),
        head_address=None if head == (job, index) else str(_address(spec, *head)),
        spec=_as_text(spec),
        resources=task_resource(job, index),
        timeout=timeout,
    )


def visitor_settings(spec: ClusterSpec, token: str, timeout: float) -> NodeSettings:
    """Returns the settings of a node beside the spec's: of a coordinator that is not in it."""
    head = head_task(spec)
    return NodeSettings(
        token=token,
        task="the coordinator",
        host=None,
        head=task_name(*head),
        head_address=str(_address(spec, *head)),
        spec=_as_text(spec),
        timeout=timeout,
    )


def claim(settings: NodeSettings) -> socket.socket:
    """Takes the task's address, so that no other process can be the same task; returns the socket.

    Nobody connects to it: Ray's processes choose free ports of the same host, and only the head is
    found by its own port.
    """
    is_head = settings.head_address is None
    host, port = settings.host, settings.port
    assert host is not None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claimed = socket.socket(family, socket.SOCK_STREAM)
    if is_head:
        # Ray has listened there before: old connections may linger, which is no obstacle.
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claimed.bind((host, port))
    except OSError as error:
        claimed.close()
        raise ClusterJoinError(_unclaimable(settings, error)) from error
    return claimed


def _unclaimable(settings: NodeSettings, error: OSError) -> str:
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
            "that the cluster spec names, or mend the cluster spec."
        )
    return f"{where}: {error}"


def is_local(spec: ClusterSpec) -> bool:
    """Tells whether all tasks are on this machine and can be reached from it only."""
    return all(is_loopback(host) for host in _hosts(spec))


def is_loopback(host: str | None) -> bool:
    """Tells whether an IP address is that of a machine for itself; None is an unknown one."""
    return host is not None and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def task_host(spec: ClusterSpec, job: str, index: int) -> str:
    """Returns the IP address of a task, as other tasks can reach it."""
    address = _address(spec, job, index)
    host = _ip_address(address.host)
    if host is None:
        raise ClusterJoinError(
            f"{name_task_field(job, index)}={str(address)!r}: the host {address.host!r} is not "
            "known here. Check its name, or write its IP address."
        )
    if not is_loopback(host):
        return host
    # On many machines their own name is a loopback address, which is of no use to the others.
    others = (other for other in _hosts(spec) if other is not None and not is_loopback(other))
    other = next(others, None)
    return LOOPBACK if other is None else _own_address(other)


def _hosts(spec: ClusterSpec) -> list[str | None]:
    tasks = [(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    return [_ip_address(_address(spec, *task).host) for task in tasks]


def _address(spec: ClusterSpec, job: str, index: int) -> Address:
    field = name_task_field(job, index)
    text = spec.task_address(job, index)
    address = parse_address(text, field)
    if address.port is None:
        raise ValueError(f"{field}={text!r}: the port is missing. Write 'host:port'.")
    return address


def _ip_address(host: str) -> str | None:
    """Returns the host's IP address, which Ray needs; None if the name is not known (yet)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    hosts = [str(info[4][0]) for info in found]
    # Ray is at home with IPv4.
    return next((host for host in hosts if ":" not in host), hosts[0])


def _own_address(other: str) -> str:
    """Returns the address with which this machine reaches another one."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((other, 9))  # Sends nothing.
        return str(probe.getsockname()[0])


def _as_text(spec: ClusterSpec) -> str:
    return json.dumps(spec.as_dict(), sort_keys=True)

"""Making this process one of the workers that train together."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final

import jax

from distribax import jax_private
from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.peers.meeting import JOIN_TIMEOUT_VARIABLE, Member, meet
from distribax.cluster.peers.session import Session
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_address
from distribax.cluster.spec.host_address import find_own_address
from distribax.cluster.spec.roles import (
    check_task,
    count_workers,
    find_worker_index,
    list_training_tasks,
)

PEER_TIMEOUT_VARIABLE: Final = "DISTRIBAX_PEER_TIMEOUT"
"""Tells after how many seconds of silence a worker counts as lost."""

COLLECTIVE_TIMEOUT_VARIABLE: Final = "DISTRIBAX_COLLECTIVE_TIMEOUT"
"""Tells how many seconds a worker waits for one that is late, before all of them end."""

_JOIN_SECONDS: Final = 30.0
_PEER_SECONDS: Final = 20.0
_COLLECTIVE_SECONDS: Final = 1800.0


@dataclass(frozen=True)
class Membership:
    """Which of how many workers this process is."""

    num_workers: int = 1
    worker_id: int = 0


_joined: tuple[str, Membership] | None = None
"""The cluster that this process is part of, as text, and its membership."""


def join_cluster(
    resolver: ClusterResolver | None,
    join_timeout: float | None = None,
    peer_timeout: float | None = None,
) -> Membership:
    """Connects this process with the workers of the cluster; an evaluator stays alone.

    Args:
        resolver: Tells the cluster and the task; None if this process is alone.
        join_timeout: How many seconds to wait for the others; None takes what the environment
            says, or the default.
        peer_timeout: After how many seconds of silence a worker counts as lost; None as above.
    """
    global _joined
    seconds = _check_seconds("join_timeout_seconds", join_timeout) or read_seconds(
        JOIN_TIMEOUT_VARIABLE, _JOIN_SECONDS
    )
    peer_seconds = _check_seconds("peer_timeout_seconds", peer_timeout) or read_seconds(
        PEER_TIMEOUT_VARIABLE, _PEER_SECONDS
    )
    spec = resolver.cluster_spec() if resolver is not None else ClusterSpec({})
    if jax.distributed.is_initialized() and _joined is None:
        # The program, or a launcher, has connected the processes itself.
        return Membership(jax.process_count(), jax.process_index())
    if resolver is None or not spec:
        return Membership()
    task_type, task_id = resolver.task_type, resolver.task_id
    check_task(spec, task_type, task_id)
    count, worker_id = count_workers(spec, task_type), find_worker_index(spec, task_type, task_id)
    if count == 1:
        return Membership()
    cluster = json.dumps(spec.as_dict(), sort_keys=True)
    if _joined is not None:
        joined, membership = _joined
        if (joined, membership.worker_id) != (cluster, worker_id):
            raise RuntimeError(
                "MultiWorkerMirroredStrategy: this process is part of another cluster already "
                f"({joined}). A process can join one cluster; start a new one."
            )
        return membership
    if jax_private.have_backends_started():
        raise RuntimeError(
            "MultiWorkerMirroredStrategy: JAX has started already, so this process cannot join a "
            "cluster any more. Create the strategy first, before any JAX computation and before "
            "jax.devices()."
        )
    members = [_make_member(spec, job, index) for job, index in list_training_tasks(spec)]
    others = [member.host for member in members]
    own_host = find_own_address(members[worker_id].host, others)
    meeting = meet(members, worker_id, seconds, cluster, peer_seconds, own_host)
    jax_private.set_collectives_host(meeting.host)
    Session(meeting).connect(seconds)
    membership = Membership(count, worker_id)
    _joined = cluster, membership
    return membership


def watch_joint_calls(timeout: float | None) -> None:
    """Has the calls of this process noted that all workers make together.

    Args:
        timeout: How many seconds one may wait for a worker that is late; None takes what the
            environment says, or the default.
    """
    seconds = timeout or read_seconds(COLLECTIVE_TIMEOUT_VARIABLE, _COLLECTIVE_SECONDS)
    if _joined is not None:
        jax_private.joint_calls.limit = seconds
        jax_private.joint_calls.is_watched = True


def _check_seconds(name: str, given: float | None) -> float | None:
    if given is not None and not 0 < given < math.inf:
        raise ValueError(
            f"MultiWorkerMirroredStrategy: {name}={given:g}: expected a positive number of seconds."
        )
    return given


def _make_member(spec: ClusterSpec, job: str, index: int) -> Member:
    address = parse_task_address(spec, job, index)
    return Member(f"{job} {index}", address.host, address.port or 0)

"""Making this process one of the workers that train together."""

from __future__ import annotations

import json
from dataclasses import dataclass

import jax

from distribax import jax_compat
from distribax.cluster.cluster_spec import ClusterSpec
from distribax.cluster.rendezvous import Member, meet
from distribax.cluster.resolver import ClusterResolver
from distribax.cluster.roles import check_task, training_tasks, worker_count, worker_index

_HEARTBEAT_SECONDS = 10


@dataclass(frozen=True)
class Membership:
    """Which of how many workers this process is."""

    num_workers: int = 1
    worker_id: int = 0


_joined: list[tuple[str, Membership]] = []


def join_cluster(resolver: ClusterResolver | None, seconds: float) -> Membership:
    """Connects this process with the workers of the cluster; an evaluator stays alone."""
    spec = resolver.cluster_spec() if resolver is not None else ClusterSpec({})
    if jax.distributed.is_initialized() and not _joined:
        # The program, or a launcher, has connected the processes itself.
        return Membership(jax.process_count(), jax.process_index())
    if resolver is None or not spec:
        return Membership()
    task_type, task_id = resolver.task_type, resolver.task_id
    check_task(spec, task_type, task_id)
    count = worker_count(spec, task_type)
    if count == 1:
        return Membership()
    cluster = json.dumps(spec.as_dict(), sort_keys=True)
    membership = Membership(count, worker_index(spec, task_type, task_id))
    if _joined:
        if _joined[0] != (cluster, membership):
            raise RuntimeError(
                "MultiWorkerMirroredStrategy: this process is part of another cluster already "
                f"({_joined[0][0]}). A process can join one cluster; start a new one."
            )
        return membership
    if jax_compat.backends_started():
        raise RuntimeError(
            "MultiWorkerMirroredStrategy: JAX has started already, so this process cannot join a "
            "cluster any more. Create the strategy first, before any JAX computation and before "
            "jax.devices()."
        )
    members = [
        _member(job, index, spec.task_address(job, index)) for job, index in training_tasks(spec)
    ]
    address = meet(members, membership.worker_id, seconds, cluster)
    jax.distributed.initialize(
        address,
        num_processes=count,
        process_id=membership.worker_id,
        initialization_timeout=max(1, int(seconds)),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        coordinator_bind_address=address,
    )
    _joined[:] = [(cluster, membership)]
    return membership


def _member(job: str, index: int, address: str) -> Member:
    host, _, port = address.rpartition(":")
    return Member(f"{job} {index}", host.strip("[]"), int(port))

"""The cluster that the environment describes: this task, its secret and its address."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from distribax.cli.checks.peers import check_peers
from distribax.cli.findings import Finding
from distribax.cluster import ClusterResolver, list_training_tasks, resolve
from distribax.cluster.peers.cluster_secret import HOW_TO, find_secret
from distribax.cluster.ray.cluster_token import TOKEN_VARIABLE, find_token
from distribax.cluster.spec.address import parse_address
from distribax.cluster.spec.host_address import (
    find_ip_address,
    find_own_address,
    is_loopback,
    listen,
)
from distribax.cluster.spec.roles import list_tasks


def check_cluster(wait_seconds: float) -> Iterator[Finding]:
    """Yields what the cluster is, whether its processes have a secret, and whom this one reaches.

    Args:
        wait_seconds: How long to wait for the doctors of the cluster's other machines.
    """
    try:
        found = resolve()
        spec = found.resolver.cluster_spec()
        task = (found.resolver.task_type, found.resolver.task_id)
    except (ValueError, RuntimeError, OSError) as error:
        fix = "correct the variable that the message names, or unset it to run a single process"
        yield Finding("cluster", "description", str(error), fix, is_problem=True)
        return
    name = type(found.resolver).__name__
    yield Finding("cluster", "resolver", f"{name}, because: {found.reason}")
    if not spec:
        return
    yield Finding("cluster", "tasks", json.dumps(spec.as_dict()))
    if task[0] is None or task[1] is None:
        value = f"type {task[0]}, index {task[1]}"
        fix = 'say which task this is: "task": {"type": "worker", "index": 0} in TF_CONFIG'
        yield Finding("cluster", "this task", value, fix, is_problem=True)
        return
    yield Finding("cluster", "this task", f"{task[0]} {task[1]}")
    own = (task[0], task[1])
    addresses = {
        each: parse_address(spec.task_address(*each), "address") for each in list_tasks(spec)
    }
    if own not in addresses:
        return  # An evaluator need not be in it.
    others = {f"{job} {index}": at for (job, index), at in addresses.items() if (job, index) != own}
    hosts = [at.host for at in addresses.values()]
    yield from _check_secret(hosts, has_servers="ps" in spec.jobs)
    own_host = find_own_address(addresses[own].host, [at.host for at in others.values()])
    yield from _check_leader(found.resolver, own, own_host)
    port = addresses[own].port or 0
    yield from check_peers(f"{own[0]} {own[1]}", own_host, port, others, wait_seconds)


def _check_leader(
    resolver: ClusterResolver, task: tuple[str, int], own_host: str | None
) -> Iterator[Finding]:
    """Checks that this task can listen at its address, if the other tasks connect to it."""
    tasks = list_training_tasks(resolver.cluster_spec())
    if len(tasks) < 2 or task != tasks[0]:
        return
    text = resolver.cluster_spec().task_address(*task)
    address = parse_address(text, "address")
    try:
        with listen(own_host or address.host, address.port or 0):
            where = "" if own_host in (None, address.host) else f" (as {own_host})"
            value = f"{text} is free{where}; the others will connect to it"
            yield Finding("cluster", "own address", value)
    except OSError as error:
        value = f"cannot listen on {text}: {error}"
        fix = "end the program that uses the port, choose another port, or correct the host"
        yield Finding("cluster", "own address", value, fix, is_problem=True)


def _check_secret(hosts: Sequence[str], *, has_servers: bool) -> Iterator[Finding]:
    """Checks that this process was given what all processes of its cluster must have.

    Args:
        hosts: The hosts of all tasks.
        has_servers: Whether there are parameter servers: then Ray's token is the secret.
    """
    try:
        is_given = bool(find_token() if has_servers else find_secret())
    except ValueError as error:
        fix = "correct the file or the variable that the message names"
        yield Finding("cluster", "secret", str(error), fix, is_problem=True)
        return
    if is_given:
        yield Finding("cluster", "secret", "given; all tasks must have the same one")
    elif has_servers:
        fix = f"set {TOKEN_VARIABLE} to the same long random text in all: openssl rand -hex 32"
        value = "none: every process makes a token of its own, and they cannot join each other"
        yield Finding("cluster", "secret", value, fix, is_problem=True)
    elif len(hosts) > 1 and not all(map(is_loopback, map(find_ip_address, hosts))):
        value = "none: whoever reaches the first worker can join or end the training"
        yield Finding("cluster", "secret", value, HOW_TO)

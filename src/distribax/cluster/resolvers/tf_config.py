"""A resolver that reads the environment variable TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, Final

from distribax.cluster.resolvers.resolver import ClusterResolver, master_url
from distribax.cluster.spec.address import parse_address
from distribax.cluster.spec.cluster_spec import ClusterSpec, task_field, task_index, task_type_name
from distribax.cluster.spec.roles import check_member

VARIABLE: Final = "TF_CONFIG"


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster, and which task of it this process is, from TF_CONFIG.

    The variable is read again at each use, so that a change counts at once. It holds JSON::

        {"cluster": {"worker": ["host0:2222", "host1:2222"]},
         "task": {"type": "worker", "index": 0}}

    Without the variable, or without "cluster" in it, the cluster is empty: a single process.

    Args:
        task_type: The job of this process, instead of task.type in TF_CONFIG.
        task_id: The index of this process, instead of task.index; 0 counts too.
        rpc_layer: The protocol, instead of rpc_layer in TF_CONFIG.
        environment: The name of the environment.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that TF_CONFIG describes now.

        Raises:
            ValueError: TF_CONFIG is malformed, or this process' task is not in its cluster.
        """
        config = _load()
        cluster = _cluster(config)
        self._task(config, cluster)
        return cluster

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, of this process' own if none is given.

        The answer is "session_master" of TF_CONFIG if that is there, and '' if there is only one
        task.
        """
        config = _load()
        if (session_master := _text(config, "session_master")) is not None:
            return session_master
        cluster = _cluster(config)
        if sum(len(cluster.job_tasks(job)) for job in cluster.jobs) <= 1:
            return ""
        if task_type is None or task_id is None:
            own_type, own_id = self._task(config, cluster)
            task_type = own_type if task_type is None else task_type
            task_id = own_id if task_id is None else task_id
        if task_type is None or task_id is None:
            field = "task.type" if task_type is None else "task.index"
            raise ValueError(
                f"{VARIABLE}: {field} is missing: which of the cluster's tasks is meant? Add "
                '"task": {"type": "worker", "index": 0}, or give task_type and task_id.'
            )
        address = cluster.task_address(task_type, task_id)
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    def environment(self) -> str:
        """The name of the environment that was given, '' if none was."""
        return self._environment or ""

    def _found_task(self) -> tuple[str | None, int | None]:
        config = _load()
        return self._task(config, _cluster(config))

    def _found_rpc_layer(self) -> str | None:
        return _text(_load(), "rpc_layer")

    def _task(self, config: dict[str, Any], cluster: ClusterSpec) -> tuple[str | None, int | None]:
        """Returns this process' task: what was set explicitly, and the rest from TF_CONFIG."""
        task = _object(config, "task")
        task_type, type_field = self._task_type, "task_type"
        task_id, id_field = self._task_id, "task_id"
        with _naming_the_variable():
            if task_type is None and "type" in task:
                task_type, type_field = task_type_name(task["type"], "task.type"), "task.type"
            if task_id is None and "index" in task:
                task_id, id_field = task_index(task["index"], "task.index"), "task.index"
            check_member(cluster, task_type, task_id, type_field=type_field, id_field=id_field)
        return task_type, task_id


@contextlib.contextmanager
def _naming_the_variable() -> Iterator[None]:
    """Makes every complaint about a value a ValueError that says where the value stands."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def _load() -> dict[str, Any]:
    """Returns the object in TF_CONFIG; an empty one if the variable is not set."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return {}
    try:
        config = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{VARIABLE} is not JSON: {error}. Expected an object such as "
            '{"cluster": {"worker": ["host0:2222"]}, "task": {"type": "worker", "index": 0}}; '
            "unset the variable to run a single process."
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{VARIABLE} is a JSON {type(config).__name__}. Expected an object with the fields "
            "cluster and task."
        )
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object; JSON would let the last of two equal keys win without a word."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object")
    return result


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the object in a field, an empty one if the field is missing or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(
            f"{VARIABLE}: {key}={value!r}: is a {type(value).__name__}. Expected an object."
        )
    return value


def _text(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{VARIABLE}: {key}={value!r}: is a {type(value).__name__}. Expected text."
        )
    return value


def _cluster(config: dict[str, Any]) -> ClusterSpec:
    jobs = _object(config, "cluster")
    with _naming_the_variable():
        cluster = ClusterSpec(jobs)
        for job in cluster.jobs:
            for i in cluster.task_indices(job):
                field, address = task_field(job, i), cluster.task_address(job, i)
                if parse_address(address, field).port is None:
                    raise ValueError(f"{field}={address!r}: the port is missing: 'host:port'")
    return cluster

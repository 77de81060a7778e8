"""A resolver that reads the environment variable TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar, cast

from typing_extensions import override

from distribax.cluster.resolvers.resolver import ClusterResolver, make_master_url
from distribax.cluster.spec.cluster_spec import (
    ClusterSpec,
    Tasks,
    parse_task_address,
    parse_task_index,
    parse_task_type,
)
from distribax.cluster.spec.roles import check_member, list_tasks

_VARIABLE: Final = "TF_CONFIG"

_T = TypeVar("_T")

_Config = Mapping[str, object]
"""The JSON object in the variable, or one inside it."""


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster, and which of its tasks this process is, from TF_CONFIG.

    The variable is read at each use. It holds JSON::

        {"cluster": {"worker": ["host0:2222", "host1:2222"]},
         "task": {"type": "worker", "index": 0}}

    Without the variable, or without "cluster" in it, the cluster is empty: a single process.
    `master()` returns the field "session_master" if there is one, '' if there is only one task, and
    raises a ValueError if TF_CONFIG does not tell which task is meant.

    Args:
        task_type: The job of this process, instead of task.type in TF_CONFIG.
        task_id: The index of this process, instead of task.index in TF_CONFIG.
        rpc_layer: The protocol, instead of rpc_layer in TF_CONFIG.
        environment: The name of the environment.
    """

    def __init__(
        self,
        task_type: str | int | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type = None if task_type is None else _parse_type(task_type, "task_type")
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self._environment = environment

    @classmethod
    @override
    def find_variables(cls) -> list[str]:
        """Returns TF_CONFIG if it is set."""
        return [_VARIABLE] if _VARIABLE in os.environ else []

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that TF_CONFIG describes now.

        Raises:
            ValueError: TF_CONFIG is malformed, or this process' task is not in its cluster.
        """
        config = _load()
        cluster = _read_cluster(config)
        self._read_task(config, cluster)
        return cluster

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        config = _load()
        if (session_master := _read_text(config, "session_master")) is not None:
            return session_master
        cluster = _read_cluster(config)
        if sum(len(cluster.job_tasks(job)) for job in cluster.jobs) <= 1:
            return ""
        if task_type is None or task_id is None:
            own_type, own_id = self._read_task(config, cluster)
            task_type = own_type if task_type is None else task_type
            task_id = own_id if task_id is None else task_id
        if task_type is None or task_id is None:
            field = "task.type" if task_type is None else "task.index"
            raise ValueError(
                f"{_VARIABLE}: {field} is missing: which of the cluster's tasks is meant? Add "
                '"task": {"type": "worker", "index": 0}, or give task_type and task_id.'
            )
        address = cluster.task_address(task_type, task_id)
        return make_master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    @override
    def environment(self) -> str | None:
        """The name of the environment that was given, or None."""
        return self._environment

    @override
    def _find_task(self) -> tuple[str | None, int | None]:
        config = _load()
        return self._read_task(config, _read_cluster(config))

    @override
    def _find_rpc_layer(self) -> str | None:
        return _read_text(_load(), "rpc_layer")

    def _read_task(self, config: _Config, cluster: ClusterSpec) -> tuple[str | None, int | None]:
        """Returns this process' task: what was set explicitly, and the rest from TF_CONFIG."""
        task = _read_object(config, "task")
        task_type, type_field = self._task_type, "task_type"
        task_id, id_field = self._task_id, "task_id"
        with _name_variable_in_errors():
            if task_type is None and "type" in task:
                task_type, type_field = _parse_type(task["type"], "task.type"), "task.type"
            if task_id is None and "index" in task:
                task_id, id_field = parse_task_index(task["index"], "task.index"), "task.index"
            check_member(cluster, task_type, task_id, type_field=type_field, id_field=id_field)
        return task_type, task_id


def _parse_type(value: object, field: str) -> str:
    """Returns the name of a job, which may be a number in JSON."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return parse_task_type(str(value) if is_number else value, field)


@contextlib.contextmanager
def _name_variable_in_errors() -> Iterator[None]:
    """Turns errors about a value into ValueErrors that name the variable."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_VARIABLE}: {error}") from None


def _load() -> _Config:
    """Returns the object in TF_CONFIG; an empty one if the variable is not set."""
    text = os.environ.get(_VARIABLE)
    if text is None:
        return {}
    try:
        config = json.loads(text, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{_VARIABLE} is not JSON: {error}. Expected an object such as "
            '{"cluster": {"worker": ["host0:2222"]}, "task": {"type": "worker", "index": 0}}; '
            "unset the variable to run a single process."
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{_VARIABLE} is a JSON {type(config).__name__}. Expected an object with the fields "
            "cluster and task."
        )
    return config


def _make_object(pairs: list[tuple[str, object]]) -> _Config:
    """Returns a JSON object; by itself, Python silently keeps the last of two equal keys."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return result


def _read_object(config: _Config, key: str) -> _Config:
    """Returns the object in a field, an empty one if the field is missing or null."""
    return _read_field(config, key, dict, "an object") or {}


def _read_text(config: _Config, key: str) -> str | None:
    return _read_field(config, key, str, "text")


def _read_field(config: _Config, key: str, kind: type[_T], expected: str) -> _T | None:
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"{_VARIABLE}: {key}={value!r}: is a {type(value).__name__}. Expected {expected}."
        )
    return value


def _read_cluster(config: _Config) -> ClusterSpec:
    # ClusterSpec checks the values, whatever they are.
    jobs = cast(Mapping[str, Tasks], _read_object(config, "cluster"))
    with _name_variable_in_errors():
        cluster = ClusterSpec(jobs)
        for task in list_tasks(cluster):
            parse_task_address(cluster, *task)
    return cluster

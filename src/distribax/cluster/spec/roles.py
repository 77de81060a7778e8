"""The roles of tasks: membership of a cluster, and the numbers of workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from distribax.cluster.spec.cluster_spec import ClusterSpec

TASK_TYPES: Final = ("chief", "worker", "ps", "evaluator")
"""The jobs that the strategies know."""


def check_member(
    cluster_spec: ClusterSpec,
    task_type: str | None,
    task_id: int | None,
    *,
    type_field: str = "task_type",
    id_field: str = "task_id",
) -> None:
    """Raises an error if the cluster has no such task.

    An evaluator need not be listed, and a cluster without jobs has room for any task.

    Args:
        cluster_spec: The cluster.
        task_type: The job of the task; None is not checked.
        task_id: The index of the task; None is not checked.
        type_field: Where `task_type` comes from, for the error message.
        id_field: Where `task_id` comes from, for the error message.

    Raises:
        ValueError: The cluster has no such task.
    """
    if not cluster_spec or task_type is None:
        return
    if task_type not in cluster_spec.jobs:
        if task_type == "evaluator":
            return
        raise ValueError(
            f"{type_field}={task_type!r}: the cluster has no such job; it has "
            f"{', '.join(map(repr, cluster_spec.jobs))}."
        )
    indices = cluster_spec.task_indices(task_type)
    if task_id is not None and task_id not in indices:
        known = f"the tasks {indices[0]} to {indices[-1]}" if indices else "no tasks"
        if indices and indices[-1] + 1 != len(indices):
            known = f"only some of {known}"
        raise ValueError(f"{id_field}={task_id}: the job {task_type!r} has {known}.")


def check_task(cluster_spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Raises an error unless a strategy can run on this cluster as this task.

    Args:
        cluster_spec: The cluster.
        task_type: The job of this process.
        task_id: The index of this process in its job.

    Raises:
        ValueError: The jobs, or the task, are not what strategies expect.
    """
    unknown = [job for job in cluster_spec.jobs if job not in TASK_TYPES]
    if unknown:
        raise ValueError(
            f"cluster_spec has the job {unknown[0]!r}. Expected only {', '.join(TASK_TYPES)}."
        )
    for job in ("chief", "evaluator"):
        if job in cluster_spec.jobs and cluster_spec.num_tasks(job) > 1:
            raise ValueError(
                f"cluster_spec has {cluster_spec.num_tasks(job)} tasks in the job {job!r}. "
                "Expected at most one."
            )
    if cluster_spec and (task_type is None or task_id is None):
        raise ValueError(
            f"task_type={task_type!r}, task_id={task_id!r}: the cluster has several tasks, and "
            "this process must know which one it is. Give both to the resolver, or, in TF_CONFIG, "
            'the field "task": {"type": "worker", "index": 0}.'
        )
    if task_type is not None and task_type not in TASK_TYPES:
        raise ValueError(f"task_type={task_type!r}: expected one of {', '.join(TASK_TYPES)}.")
    check_member(cluster_spec, task_type, task_id)


def count_workers(cluster_spec: ClusterSpec, task_type: str | None = "worker") -> int:
    """Returns how many tasks train together: chief and workers, or the evaluator alone.

    Args:
        cluster_spec: The cluster.
        task_type: The job of the task that asks.

    Returns:
        The number of tasks.

    >>> count_workers(ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}))
    3
    """
    if not cluster_spec or task_type == "evaluator":
        return 1
    return len(list_training_tasks(cluster_spec))


def find_worker_index(cluster_spec: ClusterSpec, task_type: str | None, task_id: int | None) -> int:
    """Returns the task's number among those that train together: the chief first, then workers.

    Args:
        cluster_spec: The cluster.
        task_type: The job of the task.
        task_id: The index of the task in its job.

    Returns:
        The number, from 0.

    Raises:
        ValueError: The task is not one of those that train together.

    >>> find_worker_index(ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"]}), "worker", 1)
    2
    """
    check_task(cluster_spec, task_type, task_id)
    if not cluster_spec or task_type == "evaluator":
        return 0
    numbers: dict[tuple[str | None, int | None], int] = {
        task: i for i, task in enumerate(list_training_tasks(cluster_spec))
    }
    if (task_type, task_id) not in numbers:
        raise ValueError(
            f"task_type={task_type!r}: only the chief and the workers train together and are "
            "numbered."
        )
    return numbers[task_type, task_id]


def list_training_tasks(cluster_spec: ClusterSpec) -> list[tuple[str, int]]:
    """Returns the tasks that train together, ordered by their numbers; the leader is first."""
    return list_tasks(cluster_spec, ("chief", "worker"))


def list_tasks(
    cluster_spec: ClusterSpec, jobs: Iterable[str] | None = None
) -> list[tuple[str, int]]:
    """Returns the tasks of those jobs that the cluster has, by default of all."""
    wanted = cluster_spec.jobs if jobs is None else jobs
    return [
        (job, index)
        for job in wanted
        if job in cluster_spec.jobs
        for index in cluster_spec.task_indices(job)
    ]

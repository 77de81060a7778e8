"""Who is who in a cluster."""

from __future__ import annotations

import pytest

from distribax.cluster import ClusterSpec
from distribax.cluster.spec.roles import (
    check_task,
    count_workers,
    find_worker_index,
    list_training_tasks,
)

WORKERS = ClusterSpec({"worker": ["a:1", "b:1"]})
WITH_CHIEF = ClusterSpec({"ps": ["p:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"]})
ALONE = ClusterSpec({})


def test_chief_and_workers_are_numbered_together() -> None:
    assert list_training_tasks(WITH_CHIEF) == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert [find_worker_index(WITH_CHIEF, *task) for task in list_training_tasks(WITH_CHIEF)] == [
        0,
        1,
        2,
    ]
    assert count_workers(WITH_CHIEF) == count_workers(WITH_CHIEF, "chief") == 3
    assert count_workers(WORKERS, "worker") == 2


def test_an_evaluator_and_a_process_without_a_cluster_are_alone() -> None:
    assert count_workers(WORKERS, "evaluator") == count_workers(ALONE, None) == 1
    assert find_worker_index(WORKERS, "evaluator", 0) == find_worker_index(ALONE, None, None) == 0


def test_a_parameter_server_has_no_number() -> None:
    with pytest.raises(ValueError, match="task_type='ps': only the chief and the workers"):
        find_worker_index(WITH_CHIEF, "ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        ({"master": ["a:1"]}, ("master", 0), "the job 'master'. Expected only chief, worker"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "2 tasks in the job 'chief'. Expected at most"),
        ({"evaluator": ["a:1", "b:1"]}, ("evaluator", 0), "2 tasks in the job 'evaluator'"),
        ({"worker": ["a:1"]}, (None, 0), "task_type=None, task_id=0: .* which one it is"),
        ({"worker": ["a:1"]}, ("worker", None), "task_id=None: .* which one it is"),
        ({"worker": ["a:1"]}, ("wroker", 0), "task_type='wroker': expected one of chief"),
        ({"worker": ["a:1"]}, ("ps", 0), "task_type='ps': the cluster has no such job; it has 'w"),
        ({"worker": ["a:1"]}, ("worker", 1), "task_id=1: the job 'worker' has the tasks 0 to 0"),
        ({"worker": {1: "a:1"}}, ("worker", 0), "task_id=0: .* only some of the tasks 1 to 1"),
        ({"worker": []}, ("worker", 0), "task_id=0: the job 'worker' has no tasks"),
    ],
)
def test_what_a_strategy_cannot_run_on(
    cluster: dict[str, list[str]], task: tuple[str | None, int | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_task(ClusterSpec(cluster), *task)

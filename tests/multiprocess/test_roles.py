"""Chief, workers and evaluator of a real cluster, as TF_CONFIG tells them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from distribax.testing import WorkerResult
from tests.multiprocess.workers import run_workers

pytestmark = pytest.mark.multiprocess

# What every program begins with: `run_workers` has made workers of all, and roles are dealt out.
START = """
import json, os, sys, time
from pathlib import Path

folder = Path(os.environ["TEST_FOLDER"])
config = json.loads(os.environ["TF_CONFIG"])
addresses, index = config["cluster"]["worker"], config["task"]["index"]
jobs = json.loads(os.environ["TEST_JOBS"])
cluster = {}
for job, address in zip(jobs, addresses):
    cluster.setdefault(job, []).append(address)
if "TEST_UNLISTED" in os.environ:
    del cluster[os.environ["TEST_UNLISTED"]]
task = {"type": jobs[index], "index": jobs[:index].count(jobs[index])}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})

import jax, jax.numpy as jnp, numpy as np
import distribax as dx

def tell(**values):
    print(json.dumps(values))
"""


def start(program: str, jobs: list[str], folder: Path, **options: Any) -> list[WorkerResult]:
    environment = {"TEST_JOBS": json.dumps(jobs), "TEST_FOLDER": str(folder)}
    return run_workers(
        START + textwrap.dedent(program),
        len(jobs),
        start=options.pop("start", None),
        environment=environment | options,
    )


def told(results: list[WorkerResult]) -> list[dict[str, Any]]:
    for result in results:
        assert result.returncode == 0, f"process {result.worker_id}:\n{result.stderr[-3000:]}"
    return [json.loads(result.stdout.strip().splitlines()[-1]) for result in results]


SIDE_CAR = """
dx.set_virtual_cpu_devices(2)
strategy = dx.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
with strategy.scope():
    w = dx.Variable(np.zeros(2, np.float32))
checkpoint = dx.Checkpoint(w=w)
manager = dx.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
place = {
    "task": [resolver.task_type, resolver.task_id],
    "replicas": strategy.num_replicas_in_sync,
    "processes": jax.process_count(),
}

def number():
    return jnp.asarray(dx.get_replica_context().replica_id_in_sync_group, jnp.float32)

if resolver.task_type == "evaluator":
    # It waits for the checkpoint, not for the tasks that write it.
    deadline = time.monotonic() + 300
    while manager.latest_checkpoint is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    checkpoint.restore(manager.latest_checkpoint)
    total = strategy.reduce("SUM", strategy.run(lambda: w.value() * number()), axis=None)
    tell(**place, total=np.asarray(total).tolist(), context=strategy.run(number).values[0].item())
else:
    total = strategy.reduce("SUM", strategy.run(number), axis=None)
    w.assign([float(total), 1.0])
    manager.save()
    if resolver.task_type == "chief":
        (folder / "log").write_text("step 1")
    first = strategy.experimental_local_results(strategy.run(number))[0]
    tell(**place, total=float(total), first=float(first))
"""


# That one in the cluster is no worker is seen below, where tasks are missing.
@pytest.mark.parametrize(
    "listed", [pytest.param(True, marks=pytest.mark.thorough), False], ids=["listed", "unlisted"]
)
def test_chief_and_worker_train_and_the_evaluator_works_alone(listed: bool, tmp_path: Path) -> None:
    """TensorFlow wants the evaluator in no cluster, or in it; both are accepted."""
    unlisted = {} if listed else {"TEST_UNLISTED": "evaluator"}
    jobs = ["worker", "evaluator", "chief"]
    worker, evaluator, chief = told(start(SIDE_CAR, jobs, tmp_path, **unlisted))
    assert [each["task"] for each in (worker, evaluator, chief)] == [
        ["worker", 0],
        ["evaluator", 0],
        ["chief", 0],
    ]
    assert [each["replicas"] for each in (chief, worker, evaluator)] == [4, 4, 2]
    assert [each["processes"] for each in (chief, worker, evaluator)] == [2, 2, 1]
    # The chief's replicas come first, whatever the order in TF_CONFIG.
    assert (chief["first"], worker["first"]) == (0.0, 2.0)
    assert chief["total"] == worker["total"] == 6.0
    # The sum over its own two replicas, 0 and 1.
    assert evaluator["total"] == [6.0, 1.0]
    assert (tmp_path / "log").read_text() == "step 1"


def test_an_evaluator_needs_nobody(tmp_path: Path) -> None:
    program = """
        strategy = dx.MultiWorkerMirroredStrategy(join_timeout_seconds=1)
        dataset = dx.data.Dataset.range(4).batch(4)
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        tell(rows=len(strategy.experimental_local_results(batch)[0]))
    """
    jobs = ["chief", "worker", "evaluator"]
    (evaluator,) = told(start(program, jobs, tmp_path, start=[2]))
    assert evaluator == {"rows": 4}


def test_missing_tasks_are_called_by_their_role(tmp_path: Path) -> None:
    program = """
        try:
            dx.MultiWorkerMirroredStrategy(join_timeout_seconds=10)
        except RuntimeError as error:
            tell(error=str(error))
    """
    jobs = ["chief", "worker", "worker", "evaluator"]
    chief, worker = told(start(program, jobs, tmp_path, start=[0, 1]))
    for each in (chief, worker):
        assert "worker 1 (127.0.0.1:" in each["error"]
        assert "joined: chief 0, worker 0." in each["error"]
        assert "evaluator" not in each["error"]
    (alone,) = told(start(program, jobs, tmp_path, start=[2]))
    assert alone["error"].startswith("chief 0 (127.0.0.1:")


@pytest.mark.parametrize(
    ("jobs", "asked", "words"),
    [
        # With one worker beside it, it would be one worker alone if its role were not looked at.
        (["worker", "ps"], 1, "task_type='ps': only the chief and the workers train together"),
        (["chief", "chief"], 0, "cluster_spec has 2 tasks in the job 'chief'. Expected at most"),
        (["worker", "trainer"], 0, "cluster_spec has the job 'trainer'. Expected only chief"),
    ],
)
def test_roles_that_cannot_train_are_refused(
    jobs: list[str], asked: int, words: str, tmp_path: Path
) -> None:
    program = """
        try:
            dx.MultiWorkerMirroredStrategy(join_timeout_seconds=1)
        except ValueError as error:
            tell(error=str(error))
    """
    (result,) = told(start(program, jobs, tmp_path, start=[asked]))
    assert words in result["error"]


def test_without_a_chief_worker_0_leads(tmp_path: Path) -> None:
    program = """
        resolver = dx.MultiWorkerMirroredStrategy().cluster_resolver
        tell(task=[resolver.task_type, resolver.task_id], process=jax.process_index())
    """
    first, second = told(start(program, ["worker", "worker"], tmp_path))
    assert first == {"task": ["worker", 0], "process": 0}
    assert second == {"task": ["worker", 1], "process": 1}
    chief, worker = told(start(program, ["chief", "worker"], tmp_path))
    assert chief == {"task": ["chief", 0], "process": 0}
    assert worker == {"task": ["worker", 0], "process": 1}

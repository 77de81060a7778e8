"""`train_and_evaluate` as the tasks of a cluster: chief, workers, servers and an evaluator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import distribax as dx
from distribax.cluster.ray.cluster_token import make_token
from distribax.cluster.ray.ports import find_quiet_ports
from distribax.testing import free_ports
from tests.environment import inherited
from tests.forked import ForkedProcess, start_forked
from tests.multidevice.estimator_models import eval_input_fn, make_estimator, train_by_hand
from tests.multiprocess.marked_programs import marked_programs

pytestmark = pytest.mark.multiprocess

# Every task runs the same program.
PROGRAM = """
import json, sys
import distribax as dx
from tests.multidevice.estimator_models import eval_input_fn, input_fn, make_estimator

dx.set_virtual_cpu_devices(1)
estimator = make_estimator(
    {directory!r}, eval_distribute=None, save_checkpoints_steps=3, train_distribute={strategy}
)
found = dx.estimator.train_and_evaluate(
    estimator,
    dx.estimator.TrainSpec(input_fn, max_steps=6),
    dx.estimator.EvalSpec(eval_input_fn, start_delay_secs=0, throttle_secs=0),
)
print(json.dumps(found), flush=True)
"""


def _describe(cluster: dict[str, list[str]], job: str, index: int = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def _finish(processes: Sequence[ForkedProcess]) -> list[object]:
    found = []
    try:
        for process in processes:
            out, err = process.communicate()
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def test_chief_worker_and_evaluator(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    program = PROGRAM.format(directory=str(tmp_path), strategy="dx.MultiWorkerMirroredStrategy")
    tasks = ["chief", "worker", "evaluator"]
    chief, worker, evaluator = _finish(
        [
            start_forked(program, inherited() | _describe(cluster, job), number=number)
            for number, job in enumerate(tasks)
        ]
    )
    assert chief is None and worker is None
    estimator = make_estimator(tmp_path)
    assert evaluator == estimator.evaluate(eval_input_fn) and evaluator["global_step"] == 6
    # Both workers read the same input, as their input function does not shard it.
    kernel, bias = train_by_hand(dx.OneDeviceStrategy("CPU:0"))
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), kernel, atol=1e-6)
    np.testing.assert_allclose(estimator.get_variable_value("bias"), bias, atol=1e-6)
    assert list(tmp_path.glob("eval/events*"))


def test_chief_worker_and_parameter_server(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{port}" for port in find_quiet_ports(3)]
    cluster = dict(zip(("chief", "worker", "ps"), ([each] for each in addresses), strict=True))
    program = PROGRAM.format(directory=str(tmp_path), strategy="dx.ParameterServerStrategy")
    token = {"RAY_AUTH_TOKEN": make_token()}
    with marked_programs() as programs:
        tasks = [programs.fork(program, **_describe(cluster, job), **token) for job in cluster]
        for task in tasks:
            code, out, err = task.finish()
            assert code == 0, err
            assert out.splitlines()[-1] == "null"
        assert programs.left() == []
    assert make_estimator(tmp_path).get_variable_value("global_step") == 6

"""Checkpoints, the manager and the preemption handler with workers in real processes."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.testing import WorkerResult
from tests.multiprocess.workers import run_workers

pytestmark = pytest.mark.multiprocess

START = """
import json, os, signal, time
import numpy as np, jax, jax.numpy as jnp, optax
import distribax as dx

dx.set_virtual_cpu_devices({devices})
strategy = dx.MultiWorkerMirroredStrategy()
worker = jax.process_index()
directory = {directory!r}

def tell(**values):
    print(json.dumps(values), flush=True)
"""

# Everything that a training has; one step changes all of it.
MODEL = """
with strategy.scope():
    w = dx.Variable(jnp.zeros(3))
    optimizer = dx.Optimizer(optax.adam(0.1))
    optimizer.build([w])
    mean = dx.metrics.Mean()
    count = dx.Variable(0, synchronization="ON_READ", aggregation="SUM", trainable=False)
batches = dx.data.Dataset.range(64).shuffle(9, seed=1).batch(8)
iterator = iter(strategy.experimental_distribute_dataset(batches))
checkpoint = dx.Checkpoint(w=w, optimizer=optimizer, mean=mean, count=count, data=iterator)

def step():
    def replica(x):
        optimizer.apply_gradients([(jnp.full(3, x.sum(), jnp.float32), w)])
        mean.update_state(x.astype(jnp.float32))
        count.assign_add(len(x))
    strategy.run(replica, args=(next(iterator),))

def read():
    variables = [w, *optimizer.variables, count]
    return [v.numpy().tolist() for v in variables] + [float(mean.result())]

def rest():
    seen = []
    for x in iterator:
        local = strategy.experimental_local_results(x)
        seen.append(np.concatenate([np.asarray(piece) for piece in local]).tolist())
    return seen
"""


def start(program: str, directory: Path, workers: int = 2, devices: int = 1) -> list[WorkerResult]:
    head = START.format(devices=devices, directory=str(directory))
    return run_workers(head + textwrap.dedent(program), workers)


def run(program: str, directory: Path, workers: int = 2, devices: int = 1) -> list[dict[str, Any]]:
    results = start(program, directory, workers, devices)
    for result in results:
        assert result.returncode == 0, f"worker {result.worker_id}:\n{result.stderr[-3000:]}"
    return [json.loads(result.stdout.strip().splitlines()[-1]) for result in results]


def test_saved_by_workers_and_read_by_one_process_and_back(tmp_path: Path) -> None:
    told = run(
        MODEL
        + """
step(); step()
path = checkpoint.write(directory + "/workers")
tell(path=path, read=read(), rest=rest())
""",
        tmp_path,
        devices=2,
    )
    assert told[0]["path"] == told[1]["path"] == str(tmp_path / "workers")
    assert told[0]["read"] == told[1]["read"]
    assert os.listdir(tmp_path) == ["workers"]

    # One process with three replicas reads it, and goes on.
    names: dict[str, Any] = {
        "strategy": dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
        "dx": dx,
        "jnp": jnp,
        "np": np,
        "optax": optax,
    }
    exec(MODEL, names)
    names["checkpoint"].restore(tmp_path / "workers")
    assert names["read"]() == told[0]["read"]
    names["step"]()
    alone = names["read"]()
    names["checkpoint"].write(tmp_path / "alone")
    # A batch is one half of worker 0 and one half of worker 1.
    joined = [a + b for a, b in zip(told[0]["rest"], told[1]["rest"], strict=True)]
    assert names["rest"]() == joined[1:]
    names["iterator"].close()

    # And workers read what the one process has saved.
    back = run(
        MODEL + '\ncheckpoint.restore(directory + "/alone")\ntell(read=read(), rest=rest())\n',
        tmp_path,
    )
    assert back[0]["read"] == back[1]["read"] == alone
    assert [a + b for a, b in zip(back[0]["rest"], back[1]["rest"], strict=True)] == joined[1:]


OWN_DATA = """
iterator = iter(strategy.distribute_datasets_from_function(
    lambda context: dx.data.Dataset.range(10).map(lambda x: x + 100 * worker).batch(2)))
checkpoint = dx.Checkpoint(data=iterator)
"""


def test_each_worker_gets_its_own_position_back(tmp_path: Path) -> None:
    told = run(
        OWN_DATA
        + """
next(iterator)
checkpoint.write(directory + "/own")
next(iterator)
checkpoint.restore(directory + "/own")
x = strategy.experimental_local_results(next(iterator))[0]
tell(x=np.asarray(x).tolist())
iterator.close()
""",
        tmp_path,
    )
    assert [worker["x"] for worker in told] == [[2, 3], [102, 103]]
    (alone,) = run(
        OWN_DATA
        + """
try:
    checkpoint.restore(directory + "/own")
except ValueError as error:
    tell(error=str(error))
""",
        tmp_path,
        workers=1,
    )
    assert "saved by worker 0 of 2" in alone["error"]


def test_a_failure_of_one_is_told_to_all_and_changes_nothing(tmp_path: Path) -> None:
    told = run(
        """
        with strategy.scope():
            v = dx.Variable(1.0)
        checkpoint = dx.Checkpoint(v=v)
        errors = []

        def attempt(fn, *args, **kwargs):
            try:
                fn(*args, **kwargs)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        path = checkpoint.write(directory + "/good")
        v.assign(2.0)
        attempt(checkpoint.write, path)
        # As programs do in which the chief writes, and the others somewhere else.
        checkpoint.write(directory + f"/of-{worker}")
        if worker == 0:
            import orbax.checkpoint as ocp
            def broken(*args, **kwargs):
                raise OSError("no space left")
            ocp.Checkpointer.save = broken
        attempt(checkpoint.write, directory + "/failing")
        # Only worker 1 has another model now.
        with strategy.scope():
            pair = dx.Variable([0.0, 0.0])
        other = dx.Checkpoint(v=pair) if worker == 1 else checkpoint
        attempt(other.restore, path)
        kept = float(v)
        # A worker that does not come is named in time.
        if worker == 0:
            attempt(checkpoint.write, directory + "/alone", timeout_seconds=1)
        tell(errors=errors, kept=kept)
        """,
        tmp_path,
    )
    for worker, result in enumerate(told):
        exists, full, shape, *late = result["errors"]
        first = "ValueError" if worker == 0 else "RuntimeError: Checkpoint.save: worker 0 failed"
        assert exists.startswith(first) and "exists already" in exists
        assert "no space left" in full
        assert ("worker 0 failed" in full) == (worker == 1)
        assert "was saved with shape ()" in shape
        assert ("worker 1 failed" in shape) == (worker == 0)
        assert result["kept"] == 2.0
        assert len(late) == 1 - worker
    # Worker 1 has left: worker 0 waits for it in vain, or is told that it has ended.
    last = told[0]["errors"][-1]
    assert "worker 1 did not answer within 1 s" in last or "has ended" in last
    assert sorted(os.listdir(tmp_path)) == ["good", "of-0", "of-1"]


def test_the_manager_of_workers_keeps_the_newest(tmp_path: Path) -> None:
    told = run(
        """
        with strategy.scope():
            v = dx.Variable(0.0)
        manager = dx.CheckpointManager(dx.Checkpoint(v=v), directory, max_to_keep=2)
        none = manager.restore_or_initialize()
        for _ in range(4):
            v.assign_add(1.0)
            manager.save()
        names = [os.path.basename(path) for path in manager.checkpoints]
        v.assign(0.0)
        newest = manager.restore_or_initialize()
        tell(none=none, names=names, newest=os.path.basename(newest), v=float(v))
        """,
        tmp_path,
    )
    expected = {"none": None, "names": ["ckpt-3", "ckpt-4"], "newest": "ckpt-4", "v": 4.0}
    assert told == [expected, expected]
    assert sorted(os.listdir(tmp_path)) == ["ckpt-3", "ckpt-4"]


TRAINING = """
with strategy.scope():
    w = dx.Variable(np.linspace(-1, 1, 4, dtype=np.float32))
    optimizer = dx.Optimizer(optax.adam(0.01))
    optimizer.build([w])
random = np.random.default_rng(0)
x, y = random.normal(size=(40, 4)).astype(np.float32), random.normal(size=40).astype(np.float32)
dataset = dx.data.Dataset.from_tensor_slices((x, y)).shuffle(16, seed=2).repeat().batch(8)
iterator = iter(strategy.experimental_distribute_dataset(dataset))
checkpoint = dx.Checkpoint(w=w, optimizer=optimizer, data=iterator)
handler = dx.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, directory)

@dx.function
def step(iterator):
    def replica(x, y):
        loss = lambda: dx.compute_average_loss((x @ w - y) ** 2, global_batch_size=8)
        value, gradient = dx.value_and_grad(loss, w)()
        optimizer.apply_gradients([(gradient, w)])
    strategy.run(replica, args=next(iterator))

first, total, signalled = handler.total_run_calls, {total}, {signalled}
until = time.monotonic() + 300
while handler.total_run_calls < total:
    assert time.monotonic() < until
    if handler.total_run_calls == 5 and worker == signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    handler.run(step, iterator)
    if signalled is not None:
        time.sleep(0.005)  # JAX takes some time to tell all; not too many steps until then.
iterator.close()
tell(first=first, w=[value.hex() for value in w.numpy().tolist()], steps=int(optimizer.iterations))
"""


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_an_interrupted_run_ends_like_one_that_was_not(workers: int, tmp_path: Path) -> None:
    def training(total: int, signalled: int | None) -> str:
        return TRAINING.replace("{total}", str(total)).replace("{signalled}", repr(signalled))

    directory = tmp_path / "interrupted"
    stopped = start(training(10**9, signalled=workers - 1), directory, workers)
    for result in stopped:
        assert result.returncode == 42, result.stderr[-3000:]
    told = [
        re.findall(r"(\w+ \d+): told to stop; saved after (\d+) steps", r.stderr) for r in stopped
    ]
    saved = int(told[0][0][1])
    assert told == [[(f"worker {index}", str(saved))] for index in range(workers)]
    assert saved >= 5
    total = saved + 12
    resumed = run(training(total, None), directory, workers)
    whole = run(training(total, None), tmp_path / "whole", workers)
    for one, other in zip(resumed, whole, strict=True):
        assert one["steps"] == other["steps"] == total
        assert one["w"] == other["w"] == whole[0]["w"]
        assert (one["first"], other["first"]) == (saved, 0)


def test_a_preemption_service_that_is_off_is_told(tmp_path: Path) -> None:
    told = run(
        """
        with strategy.scope():
            v = dx.Variable(0.0)
        from jax._src import distributed
        distributed.global_state.preemption_sync_manager.shutdown()
        distributed.global_state.preemption_sync_manager = None
        try:
            dx.PreemptionCheckpointHandler(None, dx.Checkpoint(v=v), directory)
        except RuntimeError as error:
            tell(error=str(error))
        """,
        tmp_path,
    )
    assert all("jax_enable_preemption_service" in worker["error"] for worker in told)


def test_all_workers_leave_out_a_damaged_checkpoint(tmp_path: Path) -> None:
    told = run(
        """
        from pathlib import Path

        with strategy.scope():
            w = dx.Variable(jnp.arange(500.0))
        manager = dx.CheckpointManager(dx.Checkpoint(w=w), directory)
        for step in (1, 2):
            w.assign(jnp.arange(500.0) + step)
            manager.save(step)
        from distribax.training.checkpoints import checkpoint_files
        read = checkpoint_files.read
        def read_damaged(path):
            # One worker alone sees the damage: its disk, or its memory.
            if worker == 1 and path.name == "ckpt-2":
                raise dx.DamagedCheckpointError(f"{path} is damaged")
            return read(path)
        checkpoint_files.read = read_damaged
        path = manager.restore_or_initialize()
        tell(path=Path(path).name, first=float(w.numpy()[0]))
        """,
        tmp_path,
    )
    assert told == [{"path": "ckpt-1", "first": 1.0}] * 2


# The disk of the first worker is slow to make directories.
OF_THEIR_OWN = """
if worker == 0:
    quickly = {"mkdir": os.mkdir, "makedirs": os.makedirs}

    def slowly(name):
        def make(path, *args, **kwargs):
            if "orbax-checkpoint-tmp/" in os.fspath(path):
                time.sleep(1.0)
            return quickly[name](path, *args, **kwargs)
        return make

    os.mkdir, os.makedirs = slowly("mkdir"), slowly("makedirs")
with strategy.scope():
    w = dx.Variable([3.0])
checkpoint = dx.Checkpoint(w=w)
path = checkpoint.write(os.path.join(directory, str(worker), "own"))
w.assign([4.0])
checkpoint.read(path)
saved = dx.CheckpointManager(checkpoint, os.path.join(directory, str(worker), "all")).save()
tell(w=w.numpy().tolist(), saved=dx.train.load_variable(saved, "w").tolist())
"""


def test_workers_write_to_paths_of_their_own_at_the_same_time(tmp_path: Path) -> None:
    assert run(OF_THEIR_OWN, tmp_path) == [{"w": [3.0], "saved": [3.0]}] * 2

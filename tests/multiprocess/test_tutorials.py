"""TensorFlow's tutorial of a custom loop on several workers, in its order of calls."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.multiprocess.workers import run_workers

pytestmark = pytest.mark.multiprocess

# The chief writes to the directory, the others to one of their own which they remove.
PROGRAM = """
import json, os, shutil
import numpy as np, jax.numpy as jnp, optax
import distribax as dx

directory = {directory!r}
num_epochs, num_steps_per_epoch, global_batch_size = {num_epochs}, 3, 8
dx.set_virtual_cpu_devices(1)
strategy = dx.MultiWorkerMirroredStrategy()


def dataset_fn(global_batch_size, input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    x = np.linspace(-1, 1, 48, dtype=np.float32)[:, None]
    dataset = dx.data.Dataset.from_tensor_slices((x, 3 * x)).shuffle(48, seed=1)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.repeat().batch(batch_size)


multi_worker_dataset = strategy.distribute_datasets_from_function(
    lambda input_context: dataset_fn(global_batch_size, input_context))

with strategy.scope():
    w = dx.Variable(jnp.zeros((1, 1)))
    optimizer = dx.Optimizer(optax.adam(0.5))
    train_loss = dx.metrics.Mean(name="train_loss")


@dx.function
def train_step(iterator):
    def step_fn(inputs):
        x, y = inputs

        def loss_fn():
            per_example = jnp.sum((jnp.matmul(x, w) - y) ** 2, axis=-1)
            return dx.compute_average_loss(per_example, global_batch_size=global_batch_size)

        loss, grads = dx.value_and_grad(loss_fn, [w])()
        optimizer.apply_gradients(zip(grads, [w]))
        train_loss.update_state(loss)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(dx.ReduceOp.SUM, per_replica_losses, axis=None)


task_type, task_id, cluster_spec = (
    strategy.cluster_resolver.task_type,
    strategy.cluster_resolver.task_id,
    strategy.cluster_resolver.cluster_spec(),
)


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def write_filepath(filepath):
    if _is_chief(task_type, task_id, cluster_spec):
        return filepath
    return os.path.join(filepath, "workertemp_" + str(task_id))


epoch = dx.Variable(initial_value=jnp.asarray(0), name="epoch")
step_in_epoch = dx.Variable(initial_value=jnp.asarray(0), name="step_in_epoch")
write_checkpoint_dir = write_filepath(directory)
checkpoint = dx.train.Checkpoint(w=w, epoch=epoch, step_in_epoch=step_in_epoch)
checkpoint_manager = dx.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
latest_checkpoint = dx.train.latest_checkpoint(directory)
if latest_checkpoint:
    checkpoint.restore(latest_checkpoint)
began = int(epoch)

losses = []
while epoch.numpy() < num_epochs:
    iterator = iter(multi_worker_dataset)
    total_loss, num_batches = 0.0, 0
    while step_in_epoch.numpy() < num_steps_per_epoch:
        total_loss += train_step(iterator)
        num_batches += 1
        step_in_epoch.assign_add(1)
    losses.append(float(total_loss / num_batches))
    train_loss.reset_states()
    epoch.assign_add(1)
    step_in_epoch.assign(0)
    checkpoint_manager.save()
    if not _is_chief(task_type, task_id, cluster_spec):
        shutil.rmtree(write_checkpoint_dir)
print(json.dumps([began, losses, w.numpy().tolist()]))
"""


def test_multi_worker_custom_loop(tmp_path: Path) -> None:
    told = []
    for num_epochs in (2, 3):
        program = PROGRAM.format(directory=str(tmp_path), num_epochs=num_epochs)
        results = run_workers(program, 2)
        for result in results:
            assert result.returncode == 0, result.stderr[-3000:]
        said = [json.loads(result.stdout.strip().splitlines()[-1]) for result in results]
        assert said[0] == said[1]
        told.append(said[0])
    assert os.listdir(tmp_path) == ["ckpt-3"]
    (began, losses, _), (again, more, _) = told
    assert (began, len(losses)) == (0, 2)
    assert losses[1] < losses[0]
    # The second run goes on where the first one has ended.
    assert (again, len(more)) == (2, 1)
    assert more[0] < losses[0]

"""Programs like those of TensorFlow's tutorials, in the order in which those make their calls.

Only the imports differ: `tf.distribute` is `dx`, GPU names stay as they are. The models are small
and written with variables, where the tutorials have Keras.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx


class Classifier:
    """Two layers that are created when the model is first called."""

    def __init__(self) -> None:
        self.variables: list[dx.Variable] = []

    def __call__(self, images: Any) -> Any:
        if not self.variables:
            random = np.random.default_rng(0)
            for shape in ((8, 16), (16,), (16, 4), (4,)):
                value = random.normal(size=shape, scale=0.3).astype(np.float32)
                self.variables.append(dx.Variable(value))
        w1, b1, w2, b2 = self.variables
        return jax.nn.relu(jnp.matmul(images, w1) + b1) @ w2 + b2

    @property
    def losses(self) -> list[Any]:
        return [1e-4 * jnp.sum(jnp.square(variable)) for variable in self.variables[::2]]


def make_images(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    images = random.normal(size=(count, 8)).astype(np.float32)
    return images, images[:, :4].argmax(axis=1).astype(np.int32)


def test_custom_training(tmp_path: Path) -> None:
    """Custom training with tf.distribute.Strategy."""
    train_images, train_labels = make_images(200)
    test_images, test_labels = make_images(90)
    strategy = dx.MirroredStrategy(["GPU:0", "GPU:1"])
    assert strategy.num_replicas_in_sync == 2
    batch_size_per_replica = 16
    global_batch_size = batch_size_per_replica * strategy.num_replicas_in_sync

    train_dataset = (
        dx.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(len(train_images))
        .batch(global_batch_size)
    )
    test_dataset = dx.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(
        global_batch_size
    )
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)
    checkpoint_prefix = os.path.join(tmp_path, "ckpt")

    with strategy.scope():

        def compute_loss(labels: Any, predictions: Any, model_losses: list[Any]) -> Any:
            per_example_loss = optax.softmax_cross_entropy_with_integer_labels(predictions, labels)
            loss = dx.compute_average_loss(per_example_loss, global_batch_size=global_batch_size)
            if model_losses:
                loss += dx.scale_regularization_loss(sum(model_losses))
            return loss

        test_loss = dx.metrics.Mean(name="test_loss")
        train_accuracy = dx.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = dx.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = Classifier()
        model(train_images[:1])
        optimizer = dx.Optimizer(optax.adam(learning_rate=0.01))
        checkpoint = dx.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs: Any) -> Any:
        images, labels = inputs

        def loss_fn() -> Any:
            predictions = model(images)
            return compute_loss(labels, predictions, model.losses), predictions

        (loss, predictions), gradients = dx.value_and_grad(loss_fn, model.variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = model(images)
        t_loss = optax.softmax_cross_entropy_with_integer_labels(predictions, labels)
        test_loss.update_state(t_loss)
        test_accuracy.update_state(labels, predictions)

    @dx.function
    def distributed_train_step(dataset_inputs: Any) -> Any:
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(dx.ReduceOp.SUM, per_replica_losses, axis=None)

    @dx.function
    def distributed_test_step(dataset_inputs: Any) -> Any:
        return strategy.run(test_step, args=(dataset_inputs,))

    history = []
    for epoch in range(3):
        total_loss, num_batches = 0.0, 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches
        for x in test_dist_dataset:
            distributed_test_step(x)
        if epoch % 2 == 0:
            checkpoint.save(checkpoint_prefix)
        line = f"{train_loss:.3f} {train_accuracy.result() * 100:.1f} {test_loss.result():.3f}"
        history.append([float(number) for number in line.split()])
        test_loss.reset_states()
        train_accuracy.reset_states()
        test_accuracy.reset_states()
    assert history[-1][0] < history[0][0]
    assert history[-1][1] > history[0][1]

    # Restore the latest checkpoint and test, without a strategy.
    eval_accuracy = dx.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model = Classifier()
    new_optimizer = dx.Optimizer(optax.adam(0.01))

    @dx.function
    def eval_step(images: Any, labels: Any) -> None:
        eval_accuracy.update_state(labels, new_model(images))

    new_checkpoint = dx.train.Checkpoint(optimizer=new_optimizer, model=new_model)
    new_checkpoint.restore(dx.train.latest_checkpoint(str(tmp_path)))
    for images, labels in test_dataset:
        eval_step(images, labels)
    for mine, saved in zip(new_model.variables, model.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), saved.numpy(), rtol=1e-6)
    assert 0 < float(eval_accuracy.result()) <= 1

    # Iterating with an iterator, and inside a function.
    total_loss, num_batches = 0.0, 0
    train_iter = iter(train_dist_dataset)
    for _ in range(3):
        total_loss += distributed_train_step(next(train_iter))
        num_batches += 1
    assert np.isfinite(float(total_loss / num_batches))

    @dx.function
    def distributed_train_epoch(dataset: Any) -> Any:
        total_loss, num_batches = 0.0, 0
        for x in dataset:
            per_replica_losses = strategy.run(train_step, args=(x,))
            total_loss += strategy.reduce(dx.ReduceOp.SUM, per_replica_losses, axis=None)
            num_batches += 1
        return total_loss / num_batches

    first = float(distributed_train_epoch(train_dist_dataset))
    for _ in range(3):
        last = float(distributed_train_epoch(train_dist_dataset))
    assert last < first
    train_iter.close()


def test_distributed_training_guide() -> None:
    """The guide's custom loop, on one replica and on two."""
    finals = []
    for strategy in (dx.OneDeviceStrategy("GPU:0"), dx.MirroredStrategy(["/gpu:0", "/gpu:1"])):
        global_batch_size = 4
        with strategy.scope():
            w, b = dx.Variable([[0.5]]), dx.Variable([0.0])
            optimizer = dx.Optimizer(optax.sgd(0.1))
        dataset = dx.data.Dataset.from_tensors(([1.0], [1.0])).repeat(20).batch(global_batch_size)
        dist_dataset = strategy.experimental_distribute_dataset(dataset)

        def train_step(inputs: Any, w: Any = w, b: Any = b, optimizer: Any = optimizer) -> Any:
            features, labels = inputs

            def loss_fn() -> Any:
                logits = features @ w + b
                per_example = optax.sigmoid_binary_cross_entropy(logits, labels).sum(axis=-1)
                return dx.compute_average_loss(per_example, global_batch_size=4)

            loss, gradients = dx.value_and_grad(loss_fn, [w, b])()
            optimizer.apply_gradients(zip(gradients, [w, b], strict=True))
            return loss

        @dx.function
        def distributed_train_step(dist_inputs: Any, strategy: Any = strategy) -> Any:
            per_replica_losses = strategy.run(train_step, args=(dist_inputs,))
            return strategy.reduce(dx.ReduceOp.SUM, per_replica_losses, axis=None)

        losses = [float(distributed_train_step(inputs)) for inputs in dist_dataset]
        iterator = iter(dist_dataset)
        losses += [float(distributed_train_step(next(iterator))) for _ in range(5)]
        with pytest.raises(dx.OutOfRangeError):
            next(iterator)
        assert losses == sorted(losses, reverse=True)
        finals.append(losses)
    np.testing.assert_allclose(finals[0], finals[1], rtol=1e-6)


def test_distributed_input() -> None:
    """Distributed input: data sets, specs, options, values from functions."""
    global_batch_size = 16
    mirrored_strategy = dx.MirroredStrategy(["GPU:0", "GPU:1"])
    dataset = dx.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    features, labels = next(iter(dist_dataset))
    assert [x.shape for x in mirrored_strategy.experimental_local_results(features)] == [(8, 1)] * 2

    # Sharding options.
    options = dx.data.Options()
    options.experimental_distribute.auto_shard_policy = dx.data.experimental.AutoShardPolicy.DATA
    dataset = dataset.with_options(options)
    assert mirrored_strategy.experimental_distribute_dataset(dataset) is not None

    def dataset_fn(input_context: dx.InputContext) -> Any:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = dx.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
        dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return dataset.unbatch().batch(batch_size).prefetch(2)

    from_function = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
    assert len(list(from_function)) == 4

    # The signature of a function is the spec of an iterator.
    iterator = iter(dist_dataset)

    @dx.function(input_signature=[iterator.element_spec])
    def replica_sum(inputs: Any) -> Any:
        return mirrored_strategy.reduce(
            "SUM",
            mirrored_strategy.run(lambda pair: jnp.sum(pair[0] + pair[1]), args=(inputs,)),
            axis=None,
        )

    assert float(replica_sum(next(iterator))) == 32.0
    assert dist_dataset.element_spec == iterator.element_spec

    # Until the end, asked for.
    has_data, taken = True, 0
    while has_data:
        optional = iterator.get_next_as_optional()
        has_data = bool(optional.has_value())
        if has_data:
            replica_sum(optional.get_value())
            taken += 1
    assert taken == 6  # The last one is partial.

    # Values of replicas, from functions.
    def value_fn(ctx: dx.experimental.ValueContext) -> Any:
        return jnp.asarray(ctx.replica_id_in_sync_group)

    distributed = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
    local = mirrored_strategy.experimental_local_results(distributed)
    assert [int(value) for value in local] == [0, 1]
    array_value = np.array([3.0, 2.0, 1.0])
    distributed = mirrored_strategy.experimental_distribute_values_from_function(
        lambda ctx: array_value[ctx.replica_id_in_sync_group]
    )
    assert [float(x) for x in mirrored_strategy.experimental_local_results(distributed)] == [3, 2]

    # A generator.
    def count_up() -> Any:
        yield from range(10)

    generated = dx.data.Dataset.from_generator(
        count_up, output_signature=dx.data.TensorSpec(shape=(), dtype=np.int32)
    ).batch(4)
    dist_generated = mirrored_strategy.experimental_distribute_dataset(generated)
    sizes = [
        [len(piece) for piece in mirrored_strategy.experimental_local_results(batch)]
        for batch in dist_generated
    ]
    assert sizes == [[2, 2], [2, 2], [1, 1]]
    iterator.close()

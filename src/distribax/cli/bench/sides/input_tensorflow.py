"""Batches on two logical CPUs through TensorFlow's experimental_distribute_dataset."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportArgumentType=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

from typing import Any

import input_problem
import tensorflow as tf
from serve import serve


def memory_dataset() -> Any:
    dataset = tf.data.Dataset.from_tensor_slices(input_problem.in_memory())
    return dataset.shuffle(input_problem.NUM_IMAGES)


def decode_natively(record: Any) -> Any:
    values = tf.io.decode_raw(record, tf.uint8, fixed_length=None)
    values = tf.ensure_shape(values, (input_problem.RECORD_BYTES,))
    image = tf.cast(tf.reshape(values[1:], (28, 28)), tf.float32) / 255.0
    return image, tf.cast(values[0], tf.int32)


def decode_in_python(record: Any) -> Any:
    image, label = tf.numpy_function(input_problem.decode, [record], (tf.float32, tf.int32))
    return tf.ensure_shape(image, (28, 28)), tf.ensure_shape(label, ())


def record_dataset(files: list[str], source: str) -> Any:
    dataset = tf.data.TFRecordDataset(files)
    if source == "native":
        return dataset.map(decode_natively, num_parallel_calls=tf.data.AUTOTUNE)
    # One call at a time: faster by a quarter than parallel calls that fight for Python's lock.
    return dataset.map(decode_in_python)


def main() -> None:
    options = input_problem.parser("memory", "python", "native").parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * options.replicas,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    if options.source == "memory":
        dataset = memory_dataset()
    else:
        files = input_problem.write_records(options.folder, options.records)
        dataset = record_dataset(files, options.source)
    batched = dataset.batch(input_problem.BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
    distributed = strategy.experimental_distribute_dataset(batched)
    batches = input_problem.repeat(distributed)

    def run(steps: int) -> dict[str, float]:
        pieces = []
        for _ in range(steps):
            _, labels = next(batches)
            pieces += strategy.experimental_local_results(labels)
        labels = tf.concat(pieces, 0)
        return {"examples": int(labels.shape[0]), "checksum": float(tf.reduce_sum(labels))}

    serve(run)


if __name__ == "__main__":
    main()

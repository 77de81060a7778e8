"""Reads record files, feeds replicas, stops in the middle of an epoch and resumes.

    python examples/input_pipeline.py --records 1000

The second half of the epoch is read with another number of replicas, as after a restart on another
machine. Every record is seen exactly once.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import distribax as dx

NUM_FILES = 4
GLOBAL_BATCH = 32
FEATURES = {
    "id": dx.data.FixedLenFeature([], np.int64),
    "values": dx.data.FixedLenFeature([8], np.float32),
}


def write(folder: Path, num_records: int) -> list[str]:
    """Writes numbered records, as TensorFlow would: tf.train.Examples in TFRecord files."""
    random = np.random.default_rng(0)
    names = [str(folder / f"part-{index}.tfrecord") for index in range(NUM_FILES)]
    for index, name in enumerate(names):
        with dx.data.TFRecordWriter(name) as writer:
            for record in range(index, num_records, NUM_FILES):
                values = random.normal(size=8).astype(np.float32)
                writer.write(dx.data.serialize_example({"id": record, "values": values}))
    return names


def pipeline(files: list[str]) -> dx.data.Dataset:
    """Reads the files in turn, shuffles the records, and batches by the global batch size."""

    def parse(record: bytes) -> tuple[np.ndarray, np.ndarray]:
        example = dx.data.parse_single_example(record, FEATURES)
        return example["id"].astype(np.int32), example["values"]

    records = dx.data.Dataset.from_tensor_slices(files).interleave(
        dx.data.TFRecordDataset, cycle_length=NUM_FILES
    )
    return records.map(parse).shuffle(200, seed=1).batch(GLOBAL_BATCH)


class Reader:
    """One epoch on some number of replicas: the records seen, and the sum of their values."""

    def __init__(self, files: list[str], num_replicas: int) -> None:
        devices = [f"CPU:{index}" for index in range(num_replicas)]
        self.strategy = dx.MirroredStrategy(devices)
        self.iterator = iter(self.strategy.experimental_distribute_dataset(pipeline(files)))
        with self.strategy.scope():
            self.total = dx.metrics.Sum()
        self.checkpoint = dx.Checkpoint(input=self.iterator, total=self.total)
        self.step = dx.function(self._step)
        self.seen: list[int] = []

    def _step(self, values: dx.PerReplica) -> None:
        def replica_step(values: jax.Array) -> None:
            self.total.update_state(jnp.sum(values, axis=1))

        self.strategy.run(replica_step, args=(values,))

    def read(self, num_steps: int | None = None) -> None:
        """Runs this many steps, or all that are left."""
        while num_steps is None or num_steps > 0:
            element = self.iterator.get_next_as_optional()
            if not element.has_value():
                return
            ids, values = element.get_value()
            self.step(values)
            for piece in self.strategy.experimental_local_results(ids):
                self.seen.extend(np.asarray(piece).tolist())
            num_steps = None if num_steps is None else num_steps - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1000)
    options = parser.parse_args()
    dx.set_virtual_cpu_devices(3)
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), options.records)

        first = Reader(files, num_replicas=2)
        first.read(num_steps=options.records // GLOBAL_BATCH // 2)
        path = first.checkpoint.save(Path(folder) / "checkpoint")
        first.iterator.close()
        print(f"2 replicas have seen {len(first.seen)} records")

        second = Reader(files, num_replicas=3)
        second.checkpoint.restore(path)
        second.read()
        print(f"3 replicas have seen the other {len(second.seen)}")

    everything = sorted(first.seen + second.seen)
    print("each record once:", everything == list(range(options.records)))
    print(f"sum of all values: {float(second.total.result()):.3f}")


if __name__ == "__main__":
    main()

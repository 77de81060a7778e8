"""Batches on two virtual CPU devices through distribax's experimental_distribute_dataset."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import input_problem
import jax
import numpy as np
from serve import serve

import distribax as dx


def make_batches(source: str, folder: Path | None, records: int) -> Any:
    """The data set of the benchmark, batched."""
    if source == "memory":
        dataset = dx.data.Dataset.from_tensor_slices(input_problem.in_memory())
        dataset = dataset.shuffle(input_problem.NUM_IMAGES)
    else:
        assert folder is not None, "--folder"
        dataset = dx.data.TFRecordDataset(input_problem.write_records(folder, records))
        dataset = dataset.map(input_problem.decode, num_parallel_calls=dx.data.AUTOTUNE)
    return dataset.batch(input_problem.BATCH_SIZE)


def resident_bytes() -> int:
    """The memory that this process holds now, without what its allocator merely keeps in store."""
    gc.collect()
    # Each thread of the C library's allocator has its own store of freed memory, and those of ended
    # threads come and go: tens of megabytes that hide a leak, or look like one.
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS: this benchmark needs Linux")


def main() -> None:
    parser = input_problem.parser("memory", "records")
    parser.add_argument("--weigh", action="store_true", help="answer with the memory held, too")
    parser.add_argument("--endless", action="store_true", help="one iterator over all epochs")
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    dataset = make_batches(options.source, options.folder, options.records)
    if options.endless:
        dataset = dataset.repeat()
    distributed = strategy.experimental_distribute_dataset(dataset)
    batches = input_problem.repeat(distributed)

    def run(steps: int) -> dict[str, float]:
        examples, checksum = 0, 0.0
        for _ in range(steps):
            pieces = strategy.experimental_local_results(next(batches))
            jax.block_until_ready(pieces)
            for _, labels in pieces:
                examples += labels.shape[0]
                checksum += float(np.asarray(labels).sum())
        figures = {"examples": examples, "checksum": checksum}
        return figures | ({"resident": resident_bytes()} if options.weigh else {})

    serve(run)


if __name__ == "__main__":
    main()

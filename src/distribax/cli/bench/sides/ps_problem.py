"""What workers do in the parameter-server benchmarks: sizes, weights and data, in NumPy.

"mlp" trains the MLP of `mlp_problem` with plain SGD; "trivial" does nothing; "embedding" looks up
rows of a table, and moves them a little towards zero.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_WORKERS = 2
BATCH_SIZE = 128
RATE = 0.01
NUM_BATCHES = 16
"""Of a worker's data set, which is repeated without end."""

WIDTH = 64
NUM_LOOKUPS = 4096


def parser() -> argparse.ArgumentParser:
    """Arguments that all sides share."""
    result = argparse.ArgumentParser()
    result.add_argument("--work", choices=("mlp", "trivial", "embedding"), default="mlp")
    result.add_argument("--rows", type=int, default=10_000, help="of the table")
    return result


def num_servers(work: str) -> int:
    return 2 if work == "embedding" else 1


def batches(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels that can be learnt, [batch, example, ...]."""
    generator = np.random.default_rng(seed)
    images = generator.standard_normal((NUM_BATCHES, BATCH_SIZE, 784)).astype(np.float32)
    labels = images[..., :10].argmax(axis=-1).astype(np.int32)
    return images, labels


def table(rows: int) -> np.ndarray:
    """The table at the beginning; the same value everywhere, so that a side is easily checked."""
    return np.ones((rows, WIDTH), np.float32)


def indices(rows: int, seed: int) -> np.ndarray:
    """Rows to look up, [step, row]; distinct in a step, so that tables of all sizes do as much."""
    generator = np.random.default_rng(seed)
    drawn = [generator.choice(rows, NUM_LOOKUPS, replace=False) for _ in range(NUM_BATCHES)]
    return np.stack(drawn).astype(np.int32)


Figures = dict[str, float]


def runner(
    schedule: Callable[[], Any], join: Callable[[], Any], figures: Callable[[], Figures]
) -> Callable[[int], Figures]:
    """Returns what schedules so many functions and waits for all; `figures` tell what was done."""

    def run(steps: int) -> Figures:
        start = time.perf_counter()
        for _ in range(steps):
            schedule()
        join()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, **figures()}

    return run

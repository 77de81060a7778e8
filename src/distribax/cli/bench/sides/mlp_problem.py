"""The training problem that every library solves: weights, data and sizes, in NumPy.

MLP 784-512-512-10 with relu, softmax cross entropy, Adam with rate 1e-3.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LAYERS = (784, 512, 512, 10)
RATE = 1e-3


@dataclass(frozen=True)
class Problem:
    """Initial weights as (kernel, bias) pairs, and one global batch of images and labels."""

    weights: list[tuple[np.ndarray, np.ndarray]]
    images: np.ndarray
    labels: np.ndarray


def make(batch_size: int, layers: Sequence[int] = LAYERS, seed: int = 0) -> Problem:
    generator = np.random.default_rng(seed)
    weights = [
        (
            (generator.standard_normal((inputs, outputs)) * (2 / inputs) ** 0.5).astype(np.float32),
            np.zeros(outputs, np.float32),
        )
        for inputs, outputs in pairwise(layers)
    ]
    images = generator.standard_normal((batch_size, layers[0])).astype(np.float32)
    labels = generator.integers(0, layers[-1], batch_size).astype(np.int32)
    return Problem(weights, images, labels)


def parser() -> argparse.ArgumentParser:
    """Arguments that all sides of the problem share."""
    result = argparse.ArgumentParser()
    result.add_argument("--batch-size", type=int, default=256)
    result.add_argument("--replicas", type=int, default=2)
    result.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    result.add_argument("--eager", action="store_true", help="run the step without compiling it")
    return result

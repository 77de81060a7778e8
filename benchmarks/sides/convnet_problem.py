"""A small convolutional network: two convolutions with relu and pooling, and a dense layer.

Images 28x28x1, 32 and 64 filters of 3x3, 10 classes, Adam with rate 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RATE = 1e-3
IMAGE = (28, 28, 1)
FILTERS = (32, 64)
NUM_FEATURES = 5 * 5 * FILTERS[-1]
NUM_CLASSES = 10


@dataclass(frozen=True)
class Problem:
    """Initial weights as (kernel, bias) pairs, and one global batch of images and labels."""

    weights: list[tuple[np.ndarray, np.ndarray]]
    images: np.ndarray
    labels: np.ndarray


def make(batch_size: int) -> Problem:
    generator = np.random.default_rng(0)
    shapes = [
        (3, 3, IMAGE[-1], FILTERS[0]),
        (3, 3, FILTERS[0], FILTERS[1]),
        (NUM_FEATURES, NUM_CLASSES),
    ]
    weights = [
        (
            (generator.standard_normal(shape) * (2 / np.prod(shape[:-1])) ** 0.5).astype(
                np.float32
            ),
            np.zeros(shape[-1], np.float32),
        )
        for shape in shapes
    ]
    images = generator.standard_normal((batch_size, *IMAGE)).astype(np.float32)
    labels = generator.integers(0, NUM_CLASSES, batch_size).astype(np.int32)
    return Problem(weights, images, labels)

"""The digits of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np

BATCH_SIZE: Final = 128


@dataclass
class Digits:
    """Images of handwritten digits, as rows of 64 numbers from 0 to 1, with their labels."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def load() -> Digits:
        """Returns the digits in `digits.npz`, a fifth of them for testing.

        They are the test set of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten
        Digits" (1998), UCI Machine Learning Repository, under the license CC BY 4.0.
        """
        path = files("distribax.cli.demo") / "digits.npz"
        with path.open("rb") as file, np.load(file) as digits:
            order = np.random.default_rng(0).permutation(len(digits["labels"]))
            images = (digits["images"][order] / 16.0).astype(np.float32)
            labels = digits["labels"][order].astype(np.int32)
        testing = len(order) // 5
        return Digits((images[testing:], labels[testing:]), (images[:testing], labels[:testing]))

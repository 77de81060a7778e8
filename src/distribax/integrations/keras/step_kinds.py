"""What the functions are that Keras's loops call for each step."""

from __future__ import annotations

import enum


class StepKind(enum.Enum):
    """What a step does; the value is the word in the names of Keras's methods."""

    TRAIN = "train"
    TEST = "test"
    PREDICT = "predict"


class ResumableStep:
    """A step that can pass over the batches that were trained before `fit` was interrupted."""

    _num_to_skip = 0

    def skip(self, num_batches: int) -> None:
        """Passes over batches that have been trained already."""
        self._num_to_skip = num_batches

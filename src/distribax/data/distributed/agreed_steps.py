"""Workers with their own data agree, step by step, on who has a batch and of which shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distribax.cluster.peers.worker_agreement import WorkerAgreement
from distribax.data.distributed.steps import Step, Steps, empty_like
from distribax.data.element_spec import zeros
from distribax.topology import InputTarget
from distribax.types import Nest


class AgreedSteps:
    """Steps that all workers take together, as long as one of them has data.

    A worker whose data has ended before the others' feeds empty batches, unless the shapes are
    promised (`drop_remainder=True`): then the end of the first one is the end of all.
    """

    def __init__(self, steps: Steps, target: InputTarget, spec: Nest) -> None:
        self._steps = steps
        self._target = target
        self._static = all(None not in leaf.shape for leaf in jax.tree.leaves(spec))
        self._empty = empty_like(zeros(spec))
        # All workers create their iterators in the same order.
        self._workers = WorkerAgreement("input", target.num_workers, target.worker_id)

    def pull(self) -> Step:
        try:
            pieces: Sequence[Nest] | None = self._steps.pull().pieces
        except StopIteration:
            pieces = None
        shapes = self._workers.exchange(
            "shapes", [_shapes(piece) for piece in pieces] if pieces else None
        )
        present = [own for own in shapes if own is not None]
        if not present or (self._static and len(present) < len(shapes)):
            raise StopIteration
        if pieces is None:
            pieces = [self._empty] * self._target.num_local_replicas
        flat = [shape for own in present for shape in own]
        even = len(present) == len(shapes) and all(shape == flat[0] for shape in flat)
        return Step(pieces, even)

    def skip(self, num_steps: int) -> None:
        self._steps.skip(num_steps)

    def get_state(self) -> Any:
        return self._steps.get_state()

    def set_state(self, state: Any) -> None:
        self._steps.set_state(state)

    def close(self) -> None:
        self._steps.close()


def _shapes(piece: Nest) -> list[list[int]]:
    return [list(np.shape(leaf)) for leaf in jax.tree.leaves(piece)]

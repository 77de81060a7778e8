"""The step that gives a worker its part of every batch, and the arithmetic of such parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from distribax.data import elements
from distribax.data.element_spec import Spec, TensorSpec
from distribax.data.plan.passes import Worker
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY, Probe, UnaryNode


@dataclass(frozen=True)
class SplitBatch:
    """A worker's batch and its pieces, one for each replica, which are views of the batch."""

    batch: elements.Element
    pieces: tuple[elements.Element, ...]
    # Whether the pieces of all workers have the same size.
    even: bool = True


@dataclass(frozen=True)
class WorkerShare:
    """Which part of a global batch belongs to a worker's replicas."""

    num_workers: int
    worker_id: int
    replicas_per_worker: int

    @property
    def num_pieces(self) -> int:
        """The number of replicas of all workers."""
        return self.num_workers * self.replicas_per_worker

    def find_piece_size(self, num_rows: int) -> int:
        """Returns the rows of a full piece: those of the global batch over the pieces, rounded up.

        The last pieces may be shorter or empty.
        """
        return -(-num_rows // self.num_pieces)

    def find_rows(self, num_rows: int) -> tuple[int, int]:
        """Returns the first row of this worker's part of a batch, and the one after its last."""
        step = self.replicas_per_worker * self.find_piece_size(num_rows)
        start = self.worker_id * step
        return min(start, num_rows), min(start + step, num_rows)

    def split(self, part: elements.Element, num_rows: int) -> SplitBatch:
        """Splits this worker's part of a global batch of `num_rows` over its replicas."""
        size = self.find_piece_size(num_rows)
        pieces = tuple(
            elements.take_rows(part, number * size, (number + 1) * size)
            for number in range(self.replicas_per_worker)
        )
        return SplitBatch(part, pieces, num_rows % self.num_pieces == 0)


@dataclass(frozen=True, eq=False)
class WorkerPart(UnaryNode):
    """Batches cut for one worker.

    Aligned: of every batch the rows of this worker's replicas, so that all workers together have
    the batch. Not aligned (`in_turn`): the worker sees every row, in batches of a worker's size.
    With `split`, elements are of the class SplitBatch: the worker's batch and its pieces.
    """

    share: WorkerShare
    in_turn: bool = False
    split: bool = False
    # The size of a full batch where the plan says it: a last, smaller batch is cut no finer.
    batch_size: int | None = None
    # The seed of shuffles without one, where all workers must shuffle alike.
    seed: int | None = None

    @property
    def worker(self) -> Worker:
        """Whose part it is."""
        return (self.share.num_workers, self.share.worker_id)

    @override
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY if self.in_turn else self.input.cardinality()

    @override
    def spec(self, probe: Probe) -> Spec:
        part: Any = elements.map_leaves(self._cut_spec, self.input.spec(probe))
        return (part,) * self.share.replicas_per_worker if self.split else part

    def _cut_spec(self, batch: TensorSpec) -> TensorSpec:
        if self.share.num_pieces == 1:
            return batch
        rows = batch.shape[0] if batch.shape else None
        pieces = 1 if self.split else self.share.replicas_per_worker
        # Only a batch that never varies and that divides has parts of one known size.
        even = rows is not None and rows % self.share.num_pieces == 0
        size = rows // self.share.num_pieces * pieces if rows is not None and even else None
        return TensorSpec((size, *batch.shape[1:]), batch.dtype)

    def find_turn_size(self, num_rows: int) -> int:
        """Returns the rows of one of the batches that a batch of `num_rows` is cut into."""
        nominal = self.batch_size or num_rows
        return self.share.replicas_per_worker * self.share.find_piece_size(nominal)

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        size = self.input.static_batch_size(probe)
        if size is None:
            return None
        start, stop = self.share.find_rows(size)
        return self.find_turn_size(size) if self.in_turn else stop - start

    @property
    @override
    def label(self) -> str:
        # Aligned parts of any number of workers share one position: the global batch's.
        return f"in_turn({self.share.num_pieces})" if self.in_turn else ""

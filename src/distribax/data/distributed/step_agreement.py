"""Workers with their own data agree, step by step, on who has a batch and of which shape."""

from __future__ import annotations

from collections.abc import Callable

from distribax import contracts
from distribax.cluster.peers.worker_agreement import WorkerAgreement
from distribax.data.distributed.step_batches import (
    StepBatches,
    is_static,
    list_shapes,
    make_empty,
)
from distribax.data.element_spec import Spec, make_zeros
from distribax.data.elements import Element
from distribax.data.formats.element_codec import load_spec, save_spec
from distribax.data.plan.plan_node import UnknownSpecError


class StepAgreement:
    """Lets all workers take steps together, as long as one of them has data.

    A worker whose data ends before the others' feeds empty batches, unless all shapes are fixed
    (`drop_remainder=True`): then the first end is the end for all. A worker that has no element,
    and so may not know what one looks like, learns it from the others.
    """

    def __init__(self, target: contracts.InputTarget, find_spec: Callable[[], Spec]) -> None:
        self._num_local_replicas = target.num_local_replicas
        try:
            self._spec: Spec | None = find_spec()
        except UnknownSpecError:
            self._spec = None
        # Known once all workers have said what they know.
        self._is_started = self._is_static = False
        self._static_shapes: list[list[int]] = []
        self._empty: Element = None
        # All workers create their iterators in the same order.
        self._workers = WorkerAgreement("input", target.num_workers, target.worker_id)

    def __call__(self, step: StepBatches | None) -> StepBatches:
        """Returns the step that all workers take, given this worker's; None at its end."""
        if not self._is_started:
            self._start()
        own = None if step is None else [_list_shapes(piece) for piece in step.pieces]
        shapes = self._workers.exchange("shapes", own)
        present = [their for their in shapes if their is not None]
        # What a function returns may vary with the values, which the spec does not tell.
        self._is_static = self._is_static and all(
            piece == self._static_shapes for their in present for piece in their
        )
        if not present or (self._is_static and len(present) < len(shapes)):
            raise StopIteration
        pieces = [self._empty] * self._num_local_replicas if step is None else step.pieces
        # Workers without a batch have empty ones, which are the same in all of them.
        empty = [_list_shapes(self._empty)] * self._num_local_replicas
        flat = [shape for their in shapes for shape in (empty if their is None else their)]
        even = all(shape == flat[0] for shape in flat)
        return StepBatches(pieces, even, shapes=[[tuple(leaf) for leaf in shape] for shape in flat])

    def _start(self) -> None:
        own = None if self._spec is None else save_spec(self._spec)
        known = [spec for spec in self._workers.exchange("specs", own) if spec is not None]
        if not known:
            raise StopIteration  # Nobody has an element.
        spec = load_spec(known[0]) if self._spec is None else self._spec
        self._is_static = is_static(spec)
        self._static_shapes = _list_shapes(spec)
        self._empty = make_empty(make_zeros(spec))
        self._is_started = True


def _list_shapes(piece: Element | Spec) -> list[list[int]]:
    return [list(shape) for shape in list_shapes(piece)]

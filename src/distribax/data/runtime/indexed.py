"""Sources that can be read in any order: order is settled on positions, then rows are fetched.

`from_tensor_slices(arrays).shuffle(n).repeat().batch(b)` becomes, for each batch, one `take` on
each array; no element is ever made on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.plan.order import Repeat, Shard, Shuffle, Skip, Take
from distribax.data.plan.pieces import WorkerPart
from distribax.data.plan.plan_node import Node
from distribax.data.plan.sources import IndexedSource
from distribax.data.plan.transforms import Batching, PaddedBatching, strip_options
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.pass_context import IteratorState, PassContext
from distribax.data.runtime.permutation import shuffle_order

Order: TypeAlias = "range | np.ndarray[Any, np.dtype[np.int64]]"

# Above this many positions an order is not written down; the elements are streamed instead.
MAX_POSITIONS = 2**26


@dataclass(frozen=True)
class IndexedPlan:
    """A part of a plan that comes down to reading rows of one source in some order."""

    source: IndexedSource
    order: Node
    repeat: int | None = 1
    batch: Batching | None = None
    part: WorkerPart | None = None


def match_plan(node: Node) -> IndexedPlan | None:
    """Recognises a source, steps that reorder it, and then perhaps repeat, batch and a part."""
    part = batch = None
    repeat: int | None = 1
    node = strip_options(node)
    if isinstance(node, WorkerPart) and not node.in_turn:
        part, node = node, strip_options(node.input)
        if not isinstance(node, Batching):
            return None
    if isinstance(node, Batching) and not isinstance(node, PaddedBatching):
        batch, node = node, strip_options(node.input)
    if isinstance(node, Repeat):
        repeat, node = node.count, strip_options(node.input)
    source = _find_source(node)
    return None if source is None else IndexedPlan(source, node, repeat, batch, part)


def _find_source(node: Node) -> IndexedSource | None:
    node = strip_options(node)
    if isinstance(node, IndexedSource):
        return node
    if isinstance(node, Shard) and node.is_hint:
        return None
    if isinstance(node, (Shuffle, Take, Skip, Shard)) or (
        isinstance(node, Repeat) and node.count is not None
    ):
        if not isinstance(node, (Take, Skip)) and node.cardinality() > MAX_POSITIONS:
            return None
        return _find_source(node.input)
    return None


def list_positions(node: Node, context: PassContext) -> Order:
    """Returns the positions in the source that one pass over `node` reads."""
    node = strip_options(node)
    if isinstance(node, IndexedSource):
        return range(node.cardinality())
    if isinstance(node, Repeat):
        assert node.count is not None
        passes = [list_positions(node.input, context.child(k)) for k in range(node.count)]
        return np.concatenate([np.empty(0, np.int64), *map(_as_array, passes)])
    assert isinstance(node, (Shuffle, Take, Skip, Shard))
    given = list_positions(node.input, context)
    if isinstance(node, Take):
        return given[: node.count]
    if isinstance(node, Skip):
        return given[node.count :]
    if isinstance(node, Shard):
        return given[node.index :: node.num_shards]
    size = len(given)
    places = size if node.buffer_size is None else node.buffer_size
    shuffled = shuffle_order(context.key(node), size, places)
    if isinstance(given, range) and given == range(size):
        return shuffled
    return _as_array(given)[shuffled]


def _as_array(order: Order) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(order, range):
        return np.arange(order.start, order.stop, order.step, dtype=np.int64)
    return order


class IndexedIterator(PipelineIterator):
    """Elements or batches of a source in a settled order; its state is two numbers."""

    def __init__(self, plan: IndexedPlan, context: PassContext) -> None:
        super().__init__()
        self._plan = plan
        self._context = context
        self._begin(0, 0)

    def _begin(self, epoch: int, position: int) -> None:
        plan = self._plan
        self._epoch, self._position = epoch, position
        ended = plan.repeat is not None and epoch >= plan.repeat
        # A data set that is repeated outside has its passes numbered there, not here.
        context = self._context if plan.repeat == 1 else self._context.child(epoch)
        self._order: Order = range(0) if ended else list_positions(plan.order, context)

    @override
    def __next__(self) -> elements.Element:
        plan = self._plan
        if plan.batch is None:
            return self._read_element()
        order = self._next_positions(plan.batch)
        self._context.progress.num_given += 1
        if plan.part is None:
            return plan.source.rows(order)
        # Only the rows of this worker's replicas are fetched.
        share = plan.part.share
        start, stop = share.find_rows(len(order))
        rows = plan.source.rows(order[start:stop])
        return share.split(rows, len(order)) if plan.part.split else rows

    def _read_element(self) -> elements.Element:
        if self._position >= len(self._order) and not self._next_epoch():
            raise StopIteration
        index = self._order[self._position]
        self._position += 1
        self._context.progress.num_given += 1
        return self._plan.source.element(int(index))

    def _next_positions(self, batch: Batching) -> Order:
        # Batches run on across repetitions.
        start, stop = self._position, self._position + batch.batch_size
        found = self._order[start:stop]
        self._position = start + len(found)
        while len(found) < batch.batch_size and self._next_epoch():
            more = self._order[: batch.batch_size - len(found)]
            self._position = len(more)
            found = np.concatenate([_as_array(found), _as_array(more)]) if len(found) else more
        if len(found) == 0 or (batch.drop_remainder and len(found) < batch.batch_size):
            raise StopIteration
        return found

    def _next_epoch(self) -> bool:
        repeat = self._plan.repeat
        last = repeat is not None and self._epoch + 1 >= repeat
        if last or not len(self._order):
            return False
        self._begin(self._epoch + 1, 0)
        return True

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(epoch=self._epoch, position=self._position)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"], state["position"])

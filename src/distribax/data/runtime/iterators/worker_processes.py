"""A map by several worker processes, for functions that hold Python's lock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
from absl import flags
from typing_extensions import override

from distribax.data.elements import Element
from distribax.data.plan.order import Shard
from distribax.data.plan.plan_node import Node
from distribax.data.plan.transforms import Map
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.pass_context import BuildIterator, IteratorState, PassContext, Seeds

_BUFFERED_ELEMENTS = 4


def _every_nth(node: Node, num_shards: int, index: int) -> Node:
    """Returns the plan of a worker: all maps, on every n-th element of what they read."""
    if isinstance(node, Map):
        return dataclasses.replace(
            node, input=_every_nth(node.input, num_shards, index), num_parallel_calls=None
        )
    return Shard(node, num_shards, index)


class _WorkerPlan(grain.IterDataset[Any]):
    """What is sent to a worker process. Node ids differ there, so seeds travel as a list."""

    def __init__(self, node: Node, context: PassContext, build: BuildIterator) -> None:
        super().__init__()
        self._node = node
        self._context = dataclasses.replace(context, seeds=Seeds(), processes=0)
        self._seeds = context.seeds.save(node)
        self._build = build

    @override
    def __iter__(self) -> PipelineIterator:
        seeds = Seeds.load(self._node, self._seeds)
        return self._build(self._node, dataclasses.replace(self._context, seeds=seeds))


class ProcessMapIterator(PipelineIterator):
    """Takes results from the workers in turn, which is the order of the elements.

    Every worker runs the pipeline before the maps and keeps its elements; a source in memory or
    of random access reads only those. An error in a worker ends the iteration.
    """

    _workers: Sequence[Any] = ()

    def __init__(self, node: Map, context: PassContext, build: BuildIterator) -> None:
        super().__init__()
        # Grain's processes read command line flags; a program that has none never parses them.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        count = context.processes
        options = grain.MultiprocessingOptions(
            num_workers=1, per_worker_buffer_size=_BUFFERED_ELEMENTS
        )
        plans = [_WorkerPlan(_every_nth(node, count, i), context, build) for i in range(count)]
        self._workers = [plan.mp_prefetch(options).__iter__() for plan in plans]
        self._turn = 0
        self._started = False

    @override
    def __next__(self) -> Element:
        if not self._started:
            # All at once, before the first is waited for.
            for worker in self._workers:
                worker.start_prefetch()
            self._started = True
        element = next(self._workers[self._turn])
        self._turn = (self._turn + 1) % len(self._workers)
        return element

    @override
    def get_state(self) -> IteratorState:
        return IteratorState(
            turn=self._turn, workers=[worker.get_state() for worker in self._workers]
        )

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._turn = state["turn"]
        for worker, saved in zip(self._workers, state["workers"], strict=True):
            worker.set_state(saved)

    @override
    def _stop(self) -> None:
        for worker in self._workers:
            worker.close()

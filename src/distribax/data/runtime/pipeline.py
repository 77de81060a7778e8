"""Turns a plan into running Grain iterators; the only way into the modules that import Grain."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.dataset_options import AUTOTUNE
from distribax.data.elements import Element
from distribax.data.formats.saved import SavedFormat, read_catalogue
from distribax.data.plan import (
    choose,
    grouping,
    order,
    pieces,
    selection,
    sources,
    transforms,
)
from distribax.data.plan.plan_node import Node, UnaryNode, walk
from distribax.data.runtime import indexed
from distribax.data.runtime.batching import cut_aligned, cut_in_turn, pad_and_stack
from distribax.data.runtime.iterators.cache import CacheIterator
from distribax.data.runtime.iterators.combine import (
    ChooseIterator,
    ConcatenateIterator,
    EmptyIterator,
    RepeatIterator,
    ZipIterator,
)
from distribax.data.runtime.iterators.grouping import (
    GroupByWindowIterator,
    RebatchIterator,
    WindowIterator,
)
from distribax.data.runtime.iterators.interleave import InterleaveIterator
from distribax.data.runtime.iterators.parallel import ParallelMapIterator
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator
from distribax.data.runtime.iterators.selection import (
    AssertCardinalityIterator,
    IgnoreErrorsIterator,
    ResampleIterator,
    ScanIterator,
    TakeWhileIterator,
    UniqueIterator,
)
from distribax.data.runtime.iterators.shuffle import ShuffleIterator
from distribax.data.runtime.iterators.snapshot import SnapshotIterator
from distribax.data.runtime.iterators.source_iterators import (
    CounterIterator,
    FileIterator,
    ForeignIterator,
    GeneratorIterator,
    RandomNumbersOf,
)
from distribax.data.runtime.iterators.streams import (
    BatchRows,
    EnumerateIterator,
    FilterIterator,
    ManyIterator,
    MapIterator,
    MappedCall,
    SettingsIterator,
    StrideIterator,
    TakeIterator,
    UserCall,
)
from distribax.data.runtime.iterators.worker_processes import ProcessMapIterator
from distribax.data.runtime.pass_context import PassContext, Seeds

# Two elements ahead keep the consumer busy while the next is made; more only costs memory.
_DEFAULT_PREFETCH = 2


def start(plan: Node, run: int, seeds: Seeds) -> PipelineIterator:
    """Starts the `run`-th iteration of a plan."""
    options = transforms.merge_options(plan)
    context = PassContext(
        run,
        threads=options.threading.private_threadpool_size or os.cpu_count() or 1,
        processes=options.worker_processes or 0,
        seeds=seeds,
    )
    return build(plan, context)


def read_first_element(plan: Node) -> Element | None:
    """Runs a plan up to its first element; None if it has none."""
    for node in walk(plan):
        if isinstance(node, sources.Foreign) and not node.repeatable:
            raise ValueError(
                f"the element_spec of {node.kind} cannot be known: it can be iterated only once, "
                "so looking at its first element would lose it. Pass a function that makes it."
            )
    iterator = build(_remove_threads(plan), PassContext())
    try:
        return next(iterator, None)
    finally:
        iterator.close()


def _remove_threads(node: Node) -> Node:
    if isinstance(node, (transforms.Prefetch, transforms.Cache)):
        return _remove_threads(node.input)
    return transforms.replace_inputs(node, _remove_threads)


def build(node: Node, context: PassContext) -> PipelineIterator:
    """Makes the iterator of one pass over a node."""
    plan = indexed.match_plan(node)
    if plan is not None:
        return indexed.IndexedIterator(plan, context)
    return _build(node, context)


# The steps whose iterator depends on the one before it and on the node alone.
_STAGES: dict[type[Node], Callable[[PipelineIterator, Any], PipelineIterator]] = {
    transforms.Filter: FilterIterator,
    transforms.Unbatch: lambda parent, node: ManyIterator(parent, BatchRows),
    transforms.Enumerate: EnumerateIterator,
    transforms.WithOptions: lambda parent, node: parent,
    order.Take: TakeIterator,
    order.Skip: lambda parent, node: StrideIterator(parent, node.count),
    grouping.Window: WindowIterator,
    grouping.Rebatch: RebatchIterator,
    selection.TakeWhile: TakeWhileIterator,
    selection.Scan: ScanIterator,
    selection.Unique: lambda parent, node: UniqueIterator(parent),
    selection.AssertCardinality: AssertCardinalityIterator,
}


@functools.singledispatch
def _build(node: Node, context: PassContext) -> PipelineIterator:
    assert isinstance(node, UnaryNode)
    return _STAGES[type(node)](build(node.input, context), node)


class _Started(grain.IterDataset[Any]):
    """A node as a Grain data set, for the steps that Grain itself carries out."""

    def __init__(self, node: Node, context: PassContext) -> None:
        super().__init__()
        self._node = node
        self._context = context

    @override
    def __iter__(self) -> PipelineIterator:
        return build(self._node, self._context)


@_build.register
def _(node: sources.GeneratorSource, context: PassContext) -> PipelineIterator:
    return GeneratorIterator(node, context.progress)


@_build.register
def _(node: sources.FileReader, context: PassContext) -> PipelineIterator:
    if node.cycle_length == 1 or len(node.filenames) < 2:
        return FileIterator(node, context.progress)
    names = build(sources.Batches(node.filenames), context)

    def open_file(name: Element, number: int, place: int) -> PipelineIterator:
        one = sources.FileReader((str(name),), node.format)
        return FileIterator(one, context.progress)

    return InterleaveIterator(names, open_file, node.cycle_length, 1)


@_build.register
def _(node: sources.Foreign, context: PassContext) -> PipelineIterator:
    return ForeignIterator(node, context.progress)


@_build.register
def _(node: sources.Counter, context: PassContext) -> PipelineIterator:
    return CounterIterator(
        lambda place: node.dtype.type(node.start + place * node.step), context.progress
    )


@_build.register
def _(node: sources.RandomNumbers, context: PassContext) -> PipelineIterator:
    return CounterIterator(RandomNumbersOf(context.key(node)), context.progress)


@_build.register
def _(node: transforms.Map, context: PassContext) -> PipelineIterator:
    threads = node.num_parallel_calls
    if threads is not None and context.processes:
        return ProcessMapIterator(node, context, build)
    parent, call = build(node.input, context), MappedCall(node.fn)
    if threads is None or threads == 1:
        return MapIterator(parent, call)
    automatic = threads == AUTOTUNE
    return ParallelMapIterator(parent, call, context.threads if automatic else threads, automatic)


@_build.register
def _(node: transforms.Batching, context: PassContext) -> PipelineIterator:
    make: Callable[[Sequence[Any]], Any] = elements.stack
    if isinstance(node, transforms.PaddedBatching):
        make = functools.partial(pad_and_stack, node)
    batches: Any = _Started(node.input, context).batch(
        node.batch_size, drop_remainder=node.drop_remainder, batch_fn=make
    )
    return batches.__iter__()


@_build.register
def _(node: transforms.Prefetch, context: PassContext) -> PipelineIterator:
    parent = build(node.input, context)
    if node.buffer_size == 0:
        return parent
    size = _DEFAULT_PREFETCH if node.buffer_size == AUTOTUNE else node.buffer_size
    return _read_ahead(parent, size)


def _read_ahead(parent: PipelineIterator, buffer_size: int) -> PipelineIterator:
    ahead: Any = grain.experimental.ThreadPrefetchDatasetIterator(
        SettingsIterator(parent), buffer_size
    )
    return ahead


@_build.register
def _(node: transforms.Cache, context: PassContext) -> PipelineIterator:
    def open_input(origin: dict[str, Any]) -> PipelineIterator:
        return build(node.input, context.load(node.input, origin))

    return CacheIterator(node.store, open_input, context.save(node.input), context.progress)


@_build.register
def _(node: transforms.Snapshot, context: PassContext) -> PipelineIterator:
    def open_saved() -> PipelineIterator:
        catalogue = read_catalogue(node.path)
        saved = SavedFormat(catalogue.spec, catalogue.compression)
        names = catalogue.filenames
        if node.reader_func is None:
            return build(sources.FileReader(names, saved, max(1, len(names))), context)
        files = tuple(node.wrap(sources.FileReader((name,), saved)) for name in names)
        return build(node.reader_func(node.wrap(sources.Items(files))).plan, context)

    return SnapshotIterator(
        node,
        lambda: build(node.input, context),
        open_saved,
        lambda: (node.input.spec(read_first_element), node.input.is_batched(read_first_element)),
    )


@_build.register
def _(node: order.Shuffle, context: PassContext) -> PipelineIterator:
    return ShuffleIterator(build(node.input, context), node.buffer_size, context.key(node))


@_build.register
def _(node: order.Repeat, context: PassContext) -> PipelineIterator:
    if node.count == 0:
        return EmptyIterator()
    return RepeatIterator(lambda k: build(node.input, context.child(k)), node.count)


@_build.register
def _(node: order.Shard, context: PassContext) -> PipelineIterator:
    if node.is_hint:
        raise ValueError(
            "shard(SHARD_HINT, ...) only marks where to shard: distribute the data set with the "
            "policy AutoShardPolicy.HINT, or give shard the numbers themselves."
        )
    return StrideIterator(build(node.input, context), node.index, node.num_shards)


@_build.register
def _(node: order.Concatenate, context: PassContext) -> PipelineIterator:
    return ConcatenateIterator(lambda k: build(node.parts[k], context), len(node.parts))


@_build.register
def _(node: order.Zip, context: PassContext) -> PipelineIterator:
    return ZipIterator([build(part, context) for part in node.parts], node.build)


@_build.register
def _(node: choose.Choose, context: PassContext) -> PipelineIterator:
    parts = [build(part, context) for part in node.parts]
    return ChooseIterator(build(node.choice, context), parts, node.stop_on_empty)


@_build.register
def _(node: grouping.GroupByWindow, context: PassContext) -> PipelineIterator:
    def open_group(key: np.int64, group: list[Element], number: int) -> PipelineIterator:
        return build(node.find_plan(key, group), context.child(number))

    return GroupByWindowIterator(build(node.input, context), node, open_group)


@_build.register
def _(node: selection.Resample, context: PassContext) -> PipelineIterator:
    return ResampleIterator(build(node.input, context), node, context.key(node))


@_build.register
def _(node: selection.IgnoreErrors, context: PassContext) -> PipelineIterator:
    return IgnoreErrorsIterator(build(node.input, context), node, context.progress)


@_build.register
def _(node: order.Interleave, context: PassContext) -> PipelineIterator:
    call = UserCall(node.fn, node.step)
    threads = node.num_parallel_calls
    # Left to choose, no threads: handing over single records costs more than reading them.
    num_threads = 0 if threads in (None, AUTOTUNE) else threads

    def open_inner(element: Element, number: int, place: int) -> PipelineIterator:
        inner = build(node.find_plan(call(element)), context.child(number))
        if place >= num_threads:
            return inner
        ahead = _read_ahead(inner, 2 * node.block_length)
        ahead.start_prefetch()
        return ahead

    return InterleaveIterator(
        build(node.input, context), open_inner, node.cycle_length, node.block_length
    )


@_build.register
def _(node: pieces.WorkerPart, context: PassContext) -> PipelineIterator:
    parent = build(node.input, context)
    if node.in_turn:
        return ManyIterator(parent, functools.partial(cut_in_turn, node))
    return MapIterator(parent, functools.partial(cut_aligned, node))

"""Turns a plan into running Grain iterators; the only way into the modules that import Grain."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from typing_extensions import override

from distribax.data import elements as nests
from distribax.data.dataset_options import AUTOTUNE
from distribax.data.elements import Element
from distribax.data.execution import indexed
from distribax.data.execution.batching import cut_aligned, cut_in_turn, pad_and_stack
from distribax.data.execution.context import Context, Seeds
from distribax.data.execution.iterators.cache import CacheIterator
from distribax.data.execution.iterators.combine import (
    ChooseIterator,
    ConcatenateIterator,
    EmptyIterator,
    RepeatIterator,
    ZipIterator,
)
from distribax.data.execution.iterators.grouping import (
    GroupByWindowIterator,
    RebatchIterator,
    WindowIterator,
)
from distribax.data.execution.iterators.interleave import InterleaveIterator
from distribax.data.execution.iterators.parallel import ParallelMapIterator
from distribax.data.execution.iterators.pipeline_iterator import PipelineIterator
from distribax.data.execution.iterators.selection import (
    AssertCardinalityIterator,
    IgnoreErrorsIterator,
    ResampleIterator,
    ScanIterator,
    TakeWhileIterator,
    UniqueIterator,
)
from distribax.data.execution.iterators.shuffle import ShuffleIterator
from distribax.data.execution.iterators.snapshot import SnapshotIterator
from distribax.data.execution.iterators.source_iterators import (
    CounterIterator,
    FileIterator,
    ForeignIterator,
    GeneratorIterator,
    RandomNumbersOf,
)
from distribax.data.execution.iterators.streams import (
    EnumerateIterator,
    FilterIterator,
    ManyIterator,
    MapIterator,
    MappedCall,
    Rows,
    SettingsIterator,
    StrideIterator,
    TakeIterator,
    UserCall,
)
from distribax.data.execution.iterators.worker_processes import ProcessMapIterator
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

# Two elements ahead keep the consumer busy while the next is made; more only costs memory.
_DEFAULT_PREFETCH = 2


def start(plan: Node, run: int, seeds: Seeds) -> PipelineIterator:
    """Starts the `run`-th iteration of a plan."""
    options = transforms.merge_options(plan)
    context = Context(
        run,
        threads=options.threading.private_threadpool_size or os.cpu_count() or 1,
        processes=options.worker_processes or 0,
        seeds=seeds,
    )
    return build(plan, context)


def first_element(plan: Node) -> Element | None:
    """Runs a plan up to its first element; None if it has none."""
    for node in walk(plan):
        if isinstance(node, sources.Foreign) and not node.repeatable:
            raise ValueError(
                f"the element_spec of {node.kind} cannot be known: it can be iterated only once, "
                "so looking at its first element would lose it. Pass a function that makes it."
            )
    iterator = build(_without_threads(plan), Context())
    try:
        return next(iterator, None)
    finally:
        iterator.close()


def _without_threads(node: Node) -> Node:
    if isinstance(node, (transforms.Prefetch, transforms.Cache)):
        return _without_threads(node.input)
    return transforms.replace_inputs(node, _without_threads)


def build(node: Node, context: Context) -> PipelineIterator:
    """Makes the iterator of one pass over a node."""
    plan = indexed.match(node)
    if plan is not None:
        return indexed.IndexedIterator(plan, context)
    return _build(node, context)


# The steps whose iterator depends on the one before it and on the node alone.
_STAGES: dict[type[Node], Callable[[PipelineIterator, Any], PipelineIterator]] = {
    transforms.Filter: FilterIterator,
    transforms.Unbatch: lambda parent, node: ManyIterator(parent, Rows),
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
def _build(node: Node, context: Context) -> PipelineIterator:
    assert isinstance(node, UnaryNode)
    return _STAGES[type(node)](build(node.input, context), node)


class _Started(grain.IterDataset[Any]):
    """A node as a Grain data set, for the steps that Grain itself carries out."""

    def __init__(self, node: Node, context: Context) -> None:
        super().__init__()
        self._node = node
        self._context = context

    @override
    def __iter__(self) -> PipelineIterator:
        return build(self._node, self._context)


@_build.register
def _(node: sources.Generator, context: Context) -> PipelineIterator:
    return GeneratorIterator(node, context.progress)


@_build.register
def _(node: sources.FileReader, context: Context) -> PipelineIterator:
    if node.cycle_length == 1 or len(node.filenames) < 2:
        return FileIterator(node, context.progress)
    names = build(sources.Batches(node.filenames), context)

    def open_file(name: Element, number: int, place: int) -> PipelineIterator:
        one = sources.FileReader((str(name),), node.format)
        return FileIterator(one, context.progress)

    return InterleaveIterator(names, open_file, node.cycle_length, 1)


@_build.register
def _(node: sources.Foreign, context: Context) -> PipelineIterator:
    return ForeignIterator(node, context.progress)


@_build.register
def _(node: sources.Counter, context: Context) -> PipelineIterator:
    return CounterIterator(
        lambda place: node.dtype.type(node.start + place * node.step), context.progress
    )


@_build.register
def _(node: sources.RandomNumbers, context: Context) -> PipelineIterator:
    return CounterIterator(RandomNumbersOf(context.key(node)), context.progress)


@_build.register
def _(node: transforms.Map, context: Context) -> PipelineIterator:
    threads = node.num_parallel_calls
    if threads is not None and context.processes:
        return ProcessMapIterator(node, context, build)
    parent, call = build(node.input, context), MappedCall(node.fn)
    if threads is None or threads == 1:
        return MapIterator(parent, call)
    automatic = threads == AUTOTUNE
    return ParallelMapIterator(parent, call, context.threads if automatic else threads, automatic)


@_build.register
def _(node: transforms.Batch, context: Context) -> PipelineIterator:
    make: Callable[[Sequence[Any]], Any] = nests.stack
    if isinstance(node, transforms.PaddedBatch):
        make = functools.partial(pad_and_stack, node)
    batches: Any = _Started(node.input, context).batch(
        node.batch_size, drop_remainder=node.drop_remainder, batch_fn=make
    )
    return batches.__iter__()


@_build.register
def _(node: transforms.Prefetch, context: Context) -> PipelineIterator:
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
def _(node: transforms.Cache, context: Context) -> PipelineIterator:
    def open_input(origin: dict[str, Any]) -> PipelineIterator:
        return build(node.input, context.load(node.input, origin))

    return CacheIterator(node.store, open_input, context.save(node.input), context.progress)


@_build.register
def _(node: transforms.Snapshot, context: Context) -> PipelineIterator:
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
        lambda: (node.input.spec(first_element), node.input.is_batched(first_element)),
    )


@_build.register
def _(node: order.Shuffle, context: Context) -> PipelineIterator:
    return ShuffleIterator(build(node.input, context), node.buffer_size, context.key(node))


@_build.register
def _(node: order.Repeat, context: Context) -> PipelineIterator:
    if node.count == 0:
        return EmptyIterator()
    return RepeatIterator(lambda k: build(node.input, context.child(k)), node.count)


@_build.register
def _(node: order.Shard, context: Context) -> PipelineIterator:
    if node.is_hint:
        raise ValueError(
            "shard(SHARD_HINT, ...) only marks where to shard: distribute the data set with the "
            "policy AutoShardPolicy.HINT, or give shard the numbers themselves."
        )
    return StrideIterator(build(node.input, context), node.index, node.num_shards)


@_build.register
def _(node: order.Concatenate, context: Context) -> PipelineIterator:
    return ConcatenateIterator(lambda k: build(node.parts[k], context), len(node.parts))


@_build.register
def _(node: order.Zip, context: Context) -> PipelineIterator:
    return ZipIterator([build(part, context) for part in node.parts], node.build)


@_build.register
def _(node: choose.Choose, context: Context) -> PipelineIterator:
    parts = [build(part, context) for part in node.parts]
    return ChooseIterator(build(node.choice, context), parts, node.stop_on_empty)


@_build.register
def _(node: grouping.GroupByWindow, context: Context) -> PipelineIterator:
    def open_group(key: np.int64, group: list[Element], number: int) -> PipelineIterator:
        return build(node.plan_of(key, group), context.child(number))

    return GroupByWindowIterator(build(node.input, context), node, open_group)


@_build.register
def _(node: selection.Resample, context: Context) -> PipelineIterator:
    return ResampleIterator(build(node.input, context), node, context.key(node))


@_build.register
def _(node: selection.IgnoreErrors, context: Context) -> PipelineIterator:
    return IgnoreErrorsIterator(build(node.input, context), node, context.progress)


@_build.register
def _(node: order.Interleave, context: Context) -> PipelineIterator:
    call = UserCall(node.fn, node.step)
    threads = node.num_parallel_calls
    # Left to choose, no threads: handing over single records costs more than reading them.
    num_threads = 0 if threads in (None, AUTOTUNE) else threads

    def open_inner(element: Element, number: int, place: int) -> PipelineIterator:
        inner = build(node.plan_of(call(element)), context.child(number))
        if place >= num_threads:
            return inner
        ahead = _read_ahead(inner, 2 * node.block_length)
        ahead.start_prefetch()
        return ahead

    return InterleaveIterator(
        build(node.input, context), open_inner, node.cycle_length, node.block_length
    )


@_build.register
def _(node: pieces.WorkerPart, context: Context) -> PipelineIterator:
    parent = build(node.input, context)
    if node.in_turn:
        return ManyIterator(parent, functools.partial(cut_in_turn, node))
    return MapIterator(parent, functools.partial(cut_aligned, node))

"""Giving every worker its own files, at the roots of a plan."""

from __future__ import annotations

import dataclasses

from distribax.data import elements
from distribax.data.plan.order import Interleave, Repeat, Shard, Shuffle, Skip, Take, Zip
from distribax.data.plan.plan_node import UNKNOWN_CARDINALITY, Node, Probe, walk
from distribax.data.plan.selection import AssertCardinality, Scan, TakeWhile, Unique
from distribax.data.plan.sources import FileNames, FileReader, RandomAccessFiles
from distribax.data.plan.transforms import (
    Cache,
    Enumerate,
    Map,
    Prefetch,
    Snapshot,
    WithOptions,
    replace_inputs,
)

_READERS = (FileReader, RandomAccessFiles)
# What they give for an element depends on those before it.
_COUNTING = (Take, Skip, Shard, TakeWhile, Enumerate, Scan, Unique)


class NotFileBased(Exception):
    """The plan cannot be divided by file; the text says why."""


def shard_files(
    plan: Node, num_workers: int, worker_id: int, probe: Probe, *, exact: bool = False
) -> Node:
    """Returns the plan with every file source cut to the worker's files.

    Raises NotFileBased if a source is not made of files or two that are zipped differ in their
    number of files, and ValueError if one has fewer files than there are workers. With `exact` it
    also refuses steps that count what is read from all files, where the workers' parts would not be
    the data set.
    """
    sharder = _FileSharder(num_workers, worker_id, probe, exact)
    return sharder.visit(plan)


def reads_files(plan: Node) -> bool:
    """Returns whether a part of the plan reads files."""
    return _has(plan, (*_READERS, FileNames))


def give_own_cache(node: Node, num_workers: int, worker_id: int) -> Node:
    """Returns the node; a cache in a file, or a snapshot, gets a file for each worker."""
    # Workers may share a disk, and each keeps something else.
    suffix = f".shard-{worker_id}-of-{num_workers}"
    if isinstance(node, Cache) and node.filename:
        return Cache(node.input, node.filename + suffix)
    if isinstance(node, Snapshot):
        return dataclasses.replace(node, path=node.path + suffix)
    return node


class _FileSharder:
    def __init__(self, num_workers: int, worker_id: int, probe: Probe, exact: bool) -> None:
        self._num_workers = num_workers
        self._worker_id = worker_id
        self._probe = probe
        self._exact = exact

    def visit(self, node: Node) -> Node:
        if isinstance(node, (FileReader, RandomAccessFiles)):
            self._check_enough(len(node.filenames), node.label)
            names = node.filenames[self._worker_id :: self._num_workers]
            return dataclasses.replace(node, filenames=names)
        if isinstance(node, FileNames):
            return self._keep_own_names(node)
        if not node.inputs:
            raise NotFileBased(f"its source {node.label} is not read from files")
        if isinstance(node, Interleave) and not _has(node.input, _READERS):
            if not _has(node.input, (FileNames,)):
                inner = node.find_first_inner(self._probe)
                if inner is None or not _has(inner, (*_READERS, FileNames)):
                    raise NotFileBased("its interleave or flat_map does not read files")
            return node.with_inputs((self._shard_names(node.input),))
        if isinstance(node, AssertCardinality):
            # The number is that of all workers' elements.
            return self.visit(node.input)
        if self._exact and isinstance(node, _COUNTING):
            raise NotFileBased(f"its {node.label} depends on what is read from all files together")
        divided = replace_inputs(node, self.visit)
        if isinstance(node, Zip) and len({_count_files(part) for part in node.parts}) > 1:
            raise NotFileBased("its zip pairs what is read from different numbers of files")
        return give_own_cache(divided, self._num_workers, self._worker_id)

    def _shard_names(self, node: Node) -> Node:
        # Below what only reorders or looks up names, so that a worker keeps its files.
        if isinstance(node, (Shuffle, Map, Prefetch, Cache, WithOptions, Repeat)):
            rewritten = replace_inputs(node, self._shard_names)
            return give_own_cache(rewritten, self._num_workers, self._worker_id)
        if isinstance(node, FileNames):
            return self._keep_own_names(node)
        # Above what counts names or pairs them, so that all workers mean the same ones.
        count = node.cardinality()
        if count != UNKNOWN_CARDINALITY and count >= 0:
            self._check_enough(count, node.label)
        return Shard(node, self._num_workers, self._worker_id)

    def _keep_own_names(self, node: FileNames) -> Node:
        self._check_enough(node.size, node.label)
        own = slice(self._worker_id, None, self._num_workers)
        return FileNames(elements.map_leaves(lambda names: names[own], node.arrays))

    def _check_enough(self, num_files: int, label: str) -> None:
        if num_files < self._num_workers:
            raise ValueError(
                f"{label} has {num_files} file(s) for {self._num_workers} workers, and sharding by "
                "file gives each worker at least one. Split the data into more files, or set "
                "options.experimental_distribute.auto_shard_policy to "
                "dx.data.AutoShardPolicy.DATA (every worker keeps its part of each batch) or OFF."
            )


def _count_files(plan: Node) -> tuple[int, ...]:
    """Returns how many files each source of a plan has; other sources count their elements."""
    if isinstance(plan, _READERS):
        return (len(plan.filenames),)
    if not plan.inputs:
        return (plan.cardinality(),)
    return tuple(count for part in plan.inputs for count in _count_files(part))


def _has(plan: Node, kinds: tuple[type[Node], ...]) -> bool:
    return any(isinstance(node, kinds) for node in walk(plan))

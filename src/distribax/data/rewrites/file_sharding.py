"""Giving every worker its own files, at the roots of a plan."""

from __future__ import annotations

import dataclasses

from distribax.data.plan.node import UNKNOWN_CARDINALITY, Node, Probe, walk
from distribax.data.plan.order import Interleave, Repeat, Shard, Shuffle
from distribax.data.plan.sources import FileNames, FileReader, RandomAccessFiles
from distribax.data.plan.transforms import Cache, Map, Prefetch, WithOptions, replace_inputs


class NotFileBased(Exception):
    """A source of the plan is not read from files; the text says which."""


def shard_files(plan: Node, num_workers: int, worker_id: int, probe: Probe) -> Node:
    """Returns the plan with every file source cut to the worker's files.

    Raises NotFileBased if a source is not made of files, and ValueError if one has fewer files
    than there are workers.
    """
    sharder = _FileSharder(num_workers, worker_id, probe)
    return sharder.visit(plan)


class _FileSharder:
    def __init__(self, num_workers: int, worker_id: int, probe: Probe) -> None:
        self._num_workers = num_workers
        self._worker_id = worker_id
        self._probe = probe

    def visit(self, node: Node) -> Node:
        if isinstance(node, (FileReader, RandomAccessFiles)):
            self._check_enough(len(node.filenames), node.label)
            names = node.filenames[self._worker_id :: self._num_workers]
            return dataclasses.replace(node, filenames=names)
        if isinstance(node, FileNames):
            self._check_enough(node.size, node.label)
            return FileNames(node.arrays[self._worker_id :: self._num_workers])
        if not node.inputs:
            raise NotFileBased(f"its source {node.label} is not read from files")
        if isinstance(node, Interleave) and not _has_files(node.input):
            inner = node.first_inner(self._probe)
            if inner is None or not _has_files(inner):
                raise NotFileBased("its interleave or flat_map does not read files")
            return node.with_inputs((self._shard_names(node.input),))
        rewritten = replace_inputs(node, self.visit)
        if isinstance(rewritten, Cache) and rewritten.filename:
            # Workers may share a disk, and each caches something else.
            suffix = f"shard-{self._worker_id}-of-{self._num_workers}"
            return Cache(rewritten.input, f"{rewritten.filename}.{suffix}")
        return rewritten

    def _shard_names(self, node: Node) -> Node:
        # Below what only reorders or looks up names, so that a worker keeps its files.
        if isinstance(node, (Shuffle, Map, Prefetch, Cache, WithOptions, Repeat)):
            return replace_inputs(node, self._shard_names)
        count = node.cardinality()
        if count != UNKNOWN_CARDINALITY and count >= 0:
            self._check_enough(count, node.label)
        return Shard(node, self._num_workers, self._worker_id)

    def _check_enough(self, num_files: int, label: str) -> None:
        if num_files < self._num_workers:
            raise ValueError(
                f"{label} has {num_files} file(s) for {self._num_workers} workers, and sharding by "
                "file gives each worker at least one. Split the data into more files, or set "
                "options.experimental_distribute.auto_shard_policy to "
                "dx.data.AutoShardPolicy.DATA (every worker keeps its part of each batch) or OFF."
            )


def _has_files(plan: Node) -> bool:
    return any(isinstance(node, (FileReader, RandomAccessFiles, FileNames)) for node in walk(plan))

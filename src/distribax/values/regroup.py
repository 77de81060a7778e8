"""Unwrapping values for a replica, and merging what the replicas return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh

from distribax import jax_private
from distribax.types import is_python_number
from distribax.values import nests
from distribax.values.distributed import PerReplica
from distribax.values.idle import NONE_IDLE, IdleReplicas
from distribax.values.indexed_slices import IndexedSlices
from distribax.values.layout import Pieces
from distribax.values.leaves import (
    is_none_opaque_or_slices,
    is_number,
    is_slices,
    is_wrapped,
    is_wrapped_or_opaque,
)

_Piece = TypeVar("_Piece")


@dataclass(frozen=True)
class _Origin:
    """What a replica's object is a copy of; the object is kept, so that its id stays unique."""

    piece: object
    whole: object
    replica_id: int


class Origins:
    """Remembers which objects were handed to replicas as copies of one value.

    A replica that returns the copy it was given returns the value itself; JAX arrays on different
    devices are different objects, so the identity that the merge rule speaks of is kept here.
    """

    def __init__(self) -> None:
        self._wholes: dict[int, _Origin] = {}

    def note(self, piece: _Piece, whole: object, replica_id: int) -> _Piece:
        """Notes that `piece` is the copy of `whole` for a replica, and returns it."""
        self._wholes[id(piece)] = _Origin(piece, whole, replica_id)
        return piece

    def find_whole(self, pieces: Sequence[object]) -> Any | None:
        """Returns the value whose copies `pieces` are, or None."""
        found = [self._wholes.get(id(piece)) for piece in pieces]
        first = found[0]
        if first is None:
            return None
        for replica_id, origin in enumerate(found):
            if origin is None or origin.whole is not first.whole or origin.replica_id != replica_id:
                return None
        return first.whole


def regroup(
    results: Sequence[object],
    origins: Origins | None = None,
    *,
    wrap: bool = False,
    mesh: Mesh | None = None,
    idle: IdleReplicas = NONE_IDLE,
) -> Any:
    """Merges the replicas' results, leaf by leaf.

    The same object from every replica comes back as that object (unless `wrap`), the copies of one
    value come back as the value, and anything else as a `PerReplica`.
    """
    flat = [jax.tree.flatten(result, is_leaf=is_none_opaque_or_slices) for result in results]
    tree: Any = flat[0][1]
    for replica_id, (leaves, other) in enumerate(flat):
        alike = map(is_slices, leaves), map(is_slices, flat[0][0])
        if other != tree or any(a != b for a, b in zip(*alike, strict=True)):
            raise ValueError(
                f"strategy.run: the replicas returned results of different structure: replica 0 "
                f"returned {tree}, replica {replica_id} returned {other}. Return the same nest "
                "from every replica."
            )
    return jax.tree.unflatten(
        tree,
        [
            _merge(leaves, origins, wrap, mesh, idle)
            for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
        ],
    )


def _merge(
    pieces: Sequence[object],
    origins: Origins | None,
    wrap: bool,
    mesh: Mesh | None,
    idle: IdleReplicas,
) -> Any:
    first = pieces[0]
    # Over several processes, what is one object here may be another one elsewhere.
    alone = mesh is None or not mesh.is_multi_process
    same = all(piece is first for piece in pieces)
    if wrap or not same or not alone:
        if is_slices(first):
            return _merge_slices(cast("Sequence[IndexedSlices]", pieces), origins, mesh)
        opened = [
            nests.open_container(piece, is_none_opaque_or_slices, of_results=True)
            for piece in pieces
        ]
        if all(new is not old for new, old in zip(opened, pieces, strict=True)):
            merged = regroup(opened, origins, wrap=wrap, mesh=mesh, idle=idle)
            return first if same and _holds_same(first, merged) else merged
    if not wrap:
        if same and (alone or not is_number(first)):
            return first
        if not alone and all(is_python_number(piece) for piece in pieces):
            # A setting of the program, if all processes have the same.
            said = repr(first) if same else f"several in process {jax.process_index()}"
            if jax_private.agree_on(said):
                return first
        whole = origins.find_whole(pieces) if origins is not None else None
        if whole is not None:
            return whole
    return PerReplica.of(Pieces(tuple(pieces), mesh), idle)


def _holds_same(container: object, other: object) -> bool:
    """Tells whether two containers of one structure hold the same objects."""
    both = (
        nests.flatten(each, is_none_opaque_or_slices, of_results=True)[0]
        for each in (container, other)
    )
    return all(mine is others for mine, others in zip(*both, strict=True))


def _merge_slices(
    pieces: Sequence[IndexedSlices], origins: Origins | None, mesh: Mesh | None
) -> IndexedSlices:
    """Merges the rows and their numbers in the same way: both are copies of one value, or none."""
    parts = [[piece.values for piece in pieces], [piece.indices for piece in pieces]]
    wholes = [origins.find_whole(part) if origins is not None else None for part in parts]
    if any(whole is None for whole in wholes):
        wholes = [PerReplica.of(Pieces(tuple(part), mesh)) for part in parts]
    return IndexedSlices.tree_unflatten(pieces[0].dense_shape, wholes)


def select(nest: object, replica_id: int, *, num_replicas: int | None = None) -> Any:
    """Returns `nest` with each wrapped value replaced by one replica's part of it.

    With `num_replicas`, a value that has parts for more of them is refused.
    """

    def part(leaf: object) -> object:
        if not is_wrapped(leaf):
            return leaf
        if num_replicas is not None:
            leaf.require_replicas(num_replicas)
        return leaf.part(replica_id)

    return nests.map_leaves(part, nest, is_wrapped_or_opaque)

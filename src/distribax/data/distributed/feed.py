"""Putting host batches on the devices of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distribax import jax_compat
from distribax.topology import InputTarget
from distribax.types import Nest
from distribax.values import PerReplica, Pieces
from distribax.values.layout import join


class Feeder:
    """Turns one host batch for each local replica into what `strategy.run` takes.

    Pieces of one shape become one array over the mesh, others stay pieces on their devices. With
    one replica that nothing is mirrored over, a batch is a plain array.
    """

    def __init__(self, target: InputTarget, to_device: bool) -> None:
        self._target = target
        self._to_device = to_device

    def __call__(self, pieces: Sequence[Nest], *, even: bool = True) -> Nest:
        flat = [jax.tree.flatten(piece) for piece in pieces]
        tree = flat[0][1]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        if len(pieces) == self._target.num_replicas_in_sync == 1:
            device = self._target.devices[0]
            return jax.tree.unflatten(tree, [self._put(leaf, device) for (leaf,) in columns])
        return jax.tree.unflatten(tree, [self._spread(column, even) for column in columns])

    def _spread(self, column: Sequence[Any], even: bool) -> PerReplica:
        placed = tuple(
            self._put(leaf, device)
            for leaf, device in zip(column, self._target.devices, strict=True)
        )
        mesh = self._target.mesh
        # Over several processes only all pieces together can tell whether they are one array.
        uneven = not even and self._target.num_workers > 1
        joined = join(placed, mesh) if mesh is not None and not uneven else None
        return PerReplica.of(joined or Pieces(placed, mesh, uneven))

    def _put(self, leaf: Any, device: jax.Device | None) -> Any:
        if not self._to_device or not _is_numeric(leaf):
            return leaf
        return jax_compat.uncommitted(jax.device_put(leaf, device))


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, int, float, complex)) or (
        isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufcV"
    )


def empty_like(piece: Nest) -> Nest:
    """Returns a batch of the same form without any example."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:0], piece)

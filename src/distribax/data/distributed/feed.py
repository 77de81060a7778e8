"""Putting host batches on the devices of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distribax import contracts, jax_private
from distribax.data.distributed.step_batches import StepBatches
from distribax.data.elements import Element
from distribax.topology import REPLICA_AXIS
from distribax.values import Global, Padded, PerReplica, Pieces
from distribax.values.layout import Evenness, Shape, join, pad

_NARROWED: dict[np.dtype[Any], type[np.integer[Any]]] = {
    np.dtype(np.int64): np.int32,
    np.dtype(np.uint64): np.uint32,
}


class Feeder:
    """Turns one host batch for each local replica into what `strategy.run` takes.

    Pieces of one shape become one array over the mesh, others stay pieces on their devices. With
    one replica, a batch is a plain array.
    """

    def __init__(self, target: contracts.InputTarget, to_device: bool) -> None:
        self._target = target
        self._to_device = to_device
        mesh = target.mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS)) if mesh else None

    @property
    def target(self) -> contracts.InputTarget:
        """The replicas that are fed."""
        return self._target

    def __call__(self, step: StepBatches) -> Element:
        if self._target.num_replicas_in_sync == 1:
            device = self._target.devices[0]
            return jax.tree.map(lambda leaf: self._put(leaf, device), step.pieces[0])
        if step.even and step.batch is not None and self._to_device and self._is_alone:
            leaves, tree = jax.tree.flatten(step.batch)
            if all(map(_is_numeric, leaves)):
                return jax.tree.unflatten(tree, self._split_by_jax(leaves))
        flat = [jax.tree.flatten(piece) for piece in step.pieces]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        shapes: Any = (
            [None] * len(columns) if step.shapes is None else zip(*step.shapes, strict=True)
        )
        spread = [self._spread(c, step.even, own) for c, own in zip(columns, shapes, strict=True)]
        return jax.tree.unflatten(flat[0][1], spread)

    @property
    def _is_alone(self) -> bool:
        return self._target.num_workers == 1 and self._target.mesh is not None

    def _split_by_jax(self, leaves: list[Any]) -> list[PerReplica]:
        """Puts whole batches on the mesh."""
        mesh, devices = self._target.mesh, self._target.devices
        assert mesh is not None and self._sharding is not None
        return [
            PerReplica.of(
                Global(jax_private.put_rows(_narrow(leaf), self._sharding, devices), mesh)
            )
            for leaf in leaves
        ]

    def _spread(
        self, column: Sequence[Any], even: bool, shapes: Sequence[Shape] | None
    ) -> PerReplica:
        padded = None if even else self._pad(column, shapes)
        if padded is not None:
            return PerReplica.of(padded)
        placed = tuple(
            self._put(leaf, device)
            for leaf, device in zip(column, self._target.devices, strict=True)
        )
        mesh = self._target.mesh
        # Over several processes only all pieces together can tell whether they are one array.
        if not even and self._target.num_workers > 1:
            return PerReplica.of(Pieces(placed, mesh, Evenness.UNEVEN))
        joined = join(placed, mesh) if mesh is not None else None
        return PerReplica.of(joined or Pieces(placed, mesh))

    def _pad(self, column: Sequence[Any], shapes: Sequence[Shape] | None) -> Padded | None:
        """Puts pieces of different shapes on the mesh as one array, if all shapes are known."""
        mesh = self._target.mesh
        if mesh is None or not self._to_device or not all(map(_is_numeric, column)):
            return None
        if shapes is None and self._is_alone:
            shapes = [np.shape(leaf) for leaf in column]
        if shapes is None or len(shapes) != mesh.size or len(set(shapes)) == 1:
            return None
        return pad(tuple(map(_narrow, column)), mesh, shapes)

    def _put(self, leaf: object, device: jax.Device | None) -> object:
        if not self._to_device or not _is_numeric(leaf):
            return leaf
        return jax_private.uncommit(jax.device_put(_narrow(leaf), device))


def _narrow(leaf: Any) -> Any:
    """Returns whole numbers in the width that JAX computes with, which would cut them off."""
    if not isinstance(leaf, (np.ndarray, np.generic)) or leaf.dtype not in _NARROWED:
        return leaf
    if jax_private.has_64_bits():
        return leaf
    narrow = leaf.astype(_NARROWED[leaf.dtype])
    wrong = narrow != leaf
    if np.any(wrong):
        raise ValueError(
            f"a batch has {np.asarray(leaf)[wrong].flat[0]} in an array of {leaf.dtype}, but JAX "
            f"computes with {narrow.dtype} and would cut it off. Set "
            'jax.config.update("jax_enable_x64", True), or bring the numbers into that range with '
            "map, for example ids % num_buckets."
        )
    return narrow


def _is_numeric(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, int, float, complex)) or (
        isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufcV"
    )

"""Reduction on one device: copy there, add, copy back."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from typing_extensions import override

from distribax import jax_private
from distribax.collectives.cross_device_ops import (
    CrossDeviceOps,
    check_same_shape,
    divide,
    mirror,
    sum_on_one_device,
)
from distribax.topology import REPLICA_AXIS, Renew, follow, resolve_device
from distribax.types import CommunicationOptions, ReduceOp
from distribax.values import Local, Mirrored, PerReplica


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, reduces them there, and copies the result back.

    The values are added in the order of the replicas, whatever the platform's all-reduce does.

    Args:
        reduce_to_device: The device that adds; the first destination by default.
        accumulation_fn: A function of two arrays that adds them; `jnp.add` by default.

    Raises:
        TypeError: `accumulation_fn` is not callable.
        ValueError: The device is not known.
    """

    def __init__(
        self,
        reduce_to_device: str | jax.Device | None = None,
        accumulation_fn: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                f"ReductionToOneDevice: accumulation_fn={accumulation_fn!r} is not callable. "
                "Expected a function of two arrays, for example jnp.add."
            )
        self.reduce_to_device = (
            None if reduce_to_device is None else resolve_device(reduce_to_device)
        )
        self.accumulation_fn: Callable[[jax.Array, jax.Array], jax.Array] = (
            accumulation_fn or jnp.add
        )
        follow(self)

    def renew_devices(self, renew: Renew) -> None:
        """Replaces the device, because JAX has been started again with more of them.

        Args:
            renew: Returns the device that replaces another.
        """
        if self.reduce_to_device is not None:
            self.reduce_to_device = renew(self.reduce_to_device)

    @override
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica | Mirrored,
        destinations: object,
        options: CommunicationOptions,
    ) -> Mirrored:
        layout = per_replica_value.layout
        if isinstance(layout, Local):
            reduced = self.all_reduce_in_program(reduce_op, [layout.value], layout.mesh, options)
            return Mirrored.of(Local(reduced[0], layout.mesh))
        check_same_shape(per_replica_value)
        values = per_replica_value.values
        device = self.reduce_to_device or _find_device(values[0])
        total = sum_on_one_device(values, device, self.accumulation_fn)
        if destinations is None and not jax_private.is_tracer(total):
            destinations = [
                device for value in values if (device := _find_device(value)) is not None
            ] or None
        return mirror(divide(total, reduce_op, len(values)), destinations)

    @override
    def all_reduce_in_program(
        self,
        reduce_op: ReduceOp,
        values: list[jax.Array],
        mesh: Mesh,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        root = self._find_root(mesh)
        return [self._reduce_on(root, reduce_op, value, mesh) for value in values]

    def _reduce_on(self, root: int, reduce_op: ReduceOp, value: jax.Array, mesh: Mesh) -> jax.Array:
        value = jax_private.to_varying(value, REPLICA_AXIS)
        index = lax.axis_index(REPLICA_AXIS)
        pieces = []
        for source in range(mesh.size):
            sent = value
            if source != root:
                sent = lax.ppermute(value, REPLICA_AXIS, [(source, root)])
            pieces.append(sent)
        total = divide(fold(self.accumulation_fn, pieces), reduce_op, mesh.size)
        # Only the root's total is the sum; the others' is dropped when the root's is copied out.
        return lax.psum(jnp.where(index == root, total, jnp.zeros_like(total)), REPLICA_AXIS)

    def _find_root(self, mesh: Mesh) -> int:
        devices = list(mesh.devices.flat)
        return devices.index(self.reduce_to_device) if self.reduce_to_device in devices else 0


def _find_device(value: object) -> jax.Device | None:
    if isinstance(value, jax.Array) and not jax_private.is_tracer(value):
        return next(iter(value.devices()))
    return None

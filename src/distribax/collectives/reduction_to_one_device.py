"""Reduction on one device: copy there, add, copy back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from typing_extensions import override

from distribax import jax_private
from distribax.collectives.cross_device_ops import (
    CrossDeviceOps,
    add_all,
    check_same_shape,
    finish,
    mirror,
    prepare,
    sum_on_one_device,
)
from distribax.topology import REPLICA_AXIS, Renew, follow, resolve_device
from distribax.types import CommunicationOptions, ReduceOp
from distribax.values import Local, Mirrored, PerReplica, find_dtype


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, reduces them there, and copies the result back.

    The values are added in the order of the replicas, whatever the platform's all-reduce does.

    Args:
        reduce_to_device: The device that adds; the first destination by default.
        accumulation_fn: A function that is given the list of all replicas' arrays, as `tf.add_n`
            is, and returns their sum. A function of two arrays, such as `jnp.add`, is called for
            one after the other. By default they are added in their order.

    Raises:
        TypeError: `accumulation_fn` is not callable.
        ValueError: The device is not known.
    """

    def __init__(
        self,
        reduce_to_device: str | jax.Device | None = None,
        accumulation_fn: Callable[..., jax.Array] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                f"ReductionToOneDevice: accumulation_fn={accumulation_fn!r} is not callable. "
                "Expected a function of a list of arrays that returns their sum, for example the "
                "built-in sum, or one of two arrays, for example jnp.add."
            )
        self.reduce_to_device = (
            None if reduce_to_device is None else resolve_device(reduce_to_device)
        )
        self.accumulation_fn: Callable[[Sequence[jax.Array]], jax.Array] = (
            add_all if accumulation_fn is None else _take_all(accumulation_fn)
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
        wide = [prepare(value, reduce_op) for value in values]
        total = sum_on_one_device(wide, device, self.accumulation_fn)
        if destinations is None and not jax_private.is_tracer(total):
            destinations = [
                device for value in values if (device := _find_device(value)) is not None
            ] or None
        dtype = find_dtype(per_replica_value.layout)
        return mirror(finish(total, reduce_op, len(values), dtype), destinations)

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
        ready = jnp.asarray(prepare(value, reduce_op))
        own = jax_private.to_varying(ready, REPLICA_AXIS)
        index = lax.axis_index(REPLICA_AXIS)
        pieces = []
        for source in range(mesh.size):
            sent = own
            if source != root:
                sent = lax.ppermute(own, REPLICA_AXIS, [(source, root)])
            pieces.append(sent)
        total = finish(self.accumulation_fn(pieces), reduce_op, mesh.size, jnp.result_type(value))
        # Only the root's total is the sum; the others' is dropped when the root's is copied out.
        return lax.psum(jnp.where(index == root, total, jnp.zeros_like(total)), REPLICA_AXIS)

    def _find_root(self, mesh: Mesh) -> int:
        devices = list(mesh.devices.flat)
        return devices.index(self.reduce_to_device) if self.reduce_to_device in devices else 0


def _take_all(fn: Callable[..., jax.Array]) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Returns a function of all values, also if `fn` takes only two of them."""
    if _count_arguments(fn) == 2:
        return lambda values: functools.reduce(fn, values)
    return fn


def _count_arguments(fn: Callable[..., object]) -> int:
    """Returns how many arguments a function must be given, as far as it tells."""
    # Functions such as jnp.add say it in this way.
    count: int | None = getattr(fn, "nin", None)
    if count is not None:
        return count
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in jax_private.list_parameters(fn)
    )


def _find_device(value: object) -> jax.Device | None:
    if isinstance(value, jax.Array) and not jax_private.is_tracer(value):
        return next(iter(value.devices()))
    return None

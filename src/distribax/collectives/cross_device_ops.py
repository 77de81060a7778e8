"""The base class of cross-device algorithms, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from distribax import contracts, jax_private
from distribax.collectives.indexed_rows import find_slices, reduce_slices, refuse_slices
from distribax.topology import resolve_device
from distribax.types import CommunicationOptions, ReduceOp, is_integer
from distribax.values import (
    DistributedValues,
    IndexedSlices,
    Local,
    Mirrored,
    PerReplica,
    divide,
    is_slices,
    is_wrapped,
    widen,
)
from distribax.values.layout import gather_joined


class CrossDeviceOps:
    """Combines values of different devices; subclass it to bring an algorithm of your own.

    A subclass overrides `reduce_implementation` and, if it can do better than one by one,
    `batch_reduce_implementation`, `broadcast_implementation` and `gather_implementation`. The
    `values` of the `PerReplica` they get are arrays both outside and inside a compiled step.

    Example:
        >>> import distribax as dx
        >>> class Tree(dx.CrossDeviceOps):
        ...     def reduce_implementation(self, reduce_op, value, destinations, options):
        ...         total = sum(value.values)
        ...         if reduce_op == dx.ReduceOp.MEAN:
        ...             total = total / len(value.values)
        ...         return self.broadcast(total, destinations)
    """

    default_options = CommunicationOptions()
    """The hints that count where a caller gives none; a strategy may set its own."""

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: PerReplica | Mirrored,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces one value of all replicas, and copies the result to `destinations`.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: The replicas' values. Of a `dx.IndexedSlices`, the rows of all
                replicas are joined.
            destinations: A variable, a distributed value, a device, or a list of devices.
            options: Hints for the collectives; those of `default_options` if None.

        Returns:
            The result, on every destination; a plain array if that is one device by name.

        Raises:
            ValueError: The value is not distributed, or the replicas' shapes differ.
        """
        op = ReduceOp.parse(reduce_op, "reduce_op")
        slices = find_slices(per_replica_value)
        if slices is not None:
            return self._reduce_slices(op, slices, destinations, options)
        value = _check(per_replica_value, "reduce: per_replica_value")
        reduced = self.reduce_implementation(
            op, value, destinations, options or self.default_options
        )
        return take_from_one_device(reduced, destinations)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several values at once, which may be faster than one after the other.

        Args:
            reduce_op: SUM or MEAN.
            value_destination_pairs: Values of all replicas, each with its destinations.
            options: Hints for the collectives; those of `default_options` if None.

        Returns:
            The results, in the order of the pairs.

        Raises:
            ValueError: A value is not distributed, or the replicas' shapes differ.
        """
        op = ReduceOp.parse(reduce_op, "reduce_op")
        results: dict[int, Any] = {}
        dense: dict[int, tuple[PerReplica | Mirrored, object]] = {}
        for index, (value, destinations) in enumerate(value_destination_pairs):
            slices = find_slices(value)
            if slices is not None:
                results[index] = self._reduce_slices(op, slices, destinations, options)
                continue
            checked = _check(value, f"batch_reduce: value_destination_pairs[{index}][0]")
            dense[index] = (checked, destinations)
        if dense:
            pairs = list(dense.values())
            reduced = self.batch_reduce_implementation(op, pairs, options or self.default_options)
            for index, value in zip(dense, reduced, strict=True):
                results[index] = take_from_one_device(value, dense[index][1])
        return [results[index] for index in range(len(results))]

    def _reduce_slices(
        self,
        reduce_op: ReduceOp,
        slices: IndexedSlices,
        destinations: object,
        options: CommunicationOptions | None,
    ) -> IndexedSlices:
        def gather(part: PerReplica | Mirrored) -> Any:
            return take_from_one_device(self.gather(part, destinations, 0, options), destinations)

        return reduce_slices(reduce_op, slices, gather)

    def broadcast(self, tensor: ArrayLike, destinations: object) -> Mirrored:
        """Copies `tensor` to all `destinations`.

        Args:
            tensor: An array or a number.
            destinations: A variable, a distributed value, a device, or a list of devices.

        Returns:
            The copies.
        """
        return self.broadcast_implementation(tensor, destinations)

    def gather(
        self,
        per_replica_value: PerReplica | Mirrored,
        destinations: object,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Mirrored:
        """Concatenates the replicas' values along `axis`, and copies them to `destinations`.

        Args:
            per_replica_value: The replicas' values.
            destinations: A variable, a distributed value, a device, or a list of devices.
            axis: The dimension along which the values are joined.
            options: Hints for the collectives; those of `default_options` if None.

        Returns:
            The joined value, on every destination.

        Raises:
            ValueError: The value is not distributed, or its shapes do not fit together.
            NotImplementedError: The value is a `dx.IndexedSlices`.
        """
        refuse_slices(per_replica_value, "gather")
        value = _check(per_replica_value, "gather: per_replica_value")
        check_gather_shapes(value, axis)
        return self.gather_implementation(
            value, destinations, axis, options or self.default_options
        )

    # What an algorithm overrides.

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica | Mirrored,
        destinations: object,
        options: CommunicationOptions,
    ) -> Mirrored:
        """Does the work of `reduce`; every algorithm overrides it.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: The replicas' values.
            destinations: Where the result is copied to; None for where the values are.
            options: Hints for the collectives.

        Returns:
            The result, on every destination.

        Raises:
            NotImplementedError: The algorithm does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how to reduce. Override "
            "reduce_implementation(self, reduce_op, per_replica_value, destinations, options) and "
            "return self.broadcast(total, destinations)."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica | Mirrored, object]],
        options: CommunicationOptions,
    ) -> list[Mirrored]:
        """Does the work of `batch_reduce`: one by one unless overridden.

        Args:
            reduce_op: SUM or MEAN.
            value_destination_pairs: Values of all replicas, each with its destinations.
            options: Hints for the collectives.

        Returns:
            The results, in the order of the pairs.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: ArrayLike, destinations: object) -> Mirrored:
        """Does the work of `broadcast`.

        Args:
            tensor: An array or a number.
            destinations: Where it is copied to.

        Returns:
            The copies.
        """
        return mirror(tensor, destinations)

    def gather_implementation(
        self,
        per_replica_value: PerReplica | Mirrored,
        destinations: object,
        axis: int,
        options: CommunicationOptions,
    ) -> Mirrored:
        """Does the work of `gather`: joins all pieces on one device unless overridden.

        Args:
            per_replica_value: The replicas' values.
            destinations: Where the result is copied to.
            axis: The dimension along which the values are joined.
            options: Hints for the collectives.

        Returns:
            The joined value, on every destination.
        """
        layout = per_replica_value.layout
        if isinstance(layout, Local):
            return Mirrored.of(Local(gather_joined(layout, axis), layout.mesh))
        pieces = [as_uncommitted(piece) for piece in per_replica_value.values]
        return self.broadcast(jnp.concatenate(pieces, axis=axis), destinations)

    # What the engine calls while it traces a compiled step.

    def all_reduce_in_program(
        self,
        reduce_op: ReduceOp,
        values: list[jax.Array],
        mesh: Mesh,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Reduces each replica's own `values` inside an SPMD program.

        Args:
            reduce_op: SUM or MEAN.
            values: This replica's arrays.
            mesh: The mesh of the replicas.
            options: Hints for the collectives.

        Returns:
            The combined arrays, the same in every replica.
        """
        wrapped = [(PerReplica.of(Local(value, mesh)), None) for value in values]
        reduced = self.batch_reduce_implementation(reduce_op, wrapped, options)
        return [value.get() for value in reduced]


def _check(value: object, argument: str) -> PerReplica | Mirrored:
    if isinstance(value, (PerReplica, Mirrored)):
        return value
    raise ValueError(
        f"{argument}={value!r} is not a PerReplica or Mirrored value. Pass what strategy.run() "
        "returned, or use strategy.reduce(), which accepts plain values where they have a meaning."
    )


def check_same_shape(value: DistributedValues) -> None:
    """Raises if the replicas' shapes differ, as after a last partial batch."""
    shapes = value.shapes()
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"reduce: the replicas' values have different shapes, {shapes}, as after a last "
            "partial batch. Say which dimension is the batch, strategy.reduce(op, x, axis=0), or "
            "reduce each replica's value to one shape first."
        )


def check_gather_shapes(value: DistributedValues, axis: object) -> None:
    """Raises unless the values can be joined along `axis`."""
    shapes = value.shapes()
    rank = len(shapes[0])
    if not is_integer(axis) or not -rank <= axis < rank:
        raise ValueError(
            f"gather: axis={axis!r} does not fit values of shape {shapes[0]}. Expected an int from "
            f"{-rank} to {rank - 1}; scalars have no axis to gather along."
        )
    others = {shape[: axis % rank] + shape[axis % rank + 1 :] for shape in shapes}
    if len(others) > 1:
        raise ValueError(
            f"gather: the replicas' shapes {shapes} differ in more than axis={axis}. All other "
            "dimensions must agree."
        )


def finish(total: jax.Array, reduce_op: ReduceOp, count: int, dtype: np.dtype[Any]) -> jax.Array:
    """Turns a sum of values of a type into what `reduce_op` asks for."""
    return divide(total, count, dtype) if reduce_op is ReduceOp.MEAN else total


def prepare(value: ArrayLike, reduce_op: ReduceOp) -> ArrayLike:
    """Returns a value as it is to be added up for `reduce_op`."""
    return widen(value) if reduce_op is ReduceOp.MEAN else value


def as_uncommitted(value: ArrayLike) -> jax.Array:
    """Returns `value` as an array that can be mixed with those of other devices."""
    return jax_private.uncommit(value) if isinstance(value, jax.Array) else jnp.asarray(value)


def add_all(values: Sequence[jax.Array]) -> jax.Array:
    """Adds arrays in their order; truth values are counted."""
    total = values[0].astype(jnp.int32) if values[0].dtype == jnp.bool_ else values[0]
    for value in values[1:]:
        total = jnp.add(total, value)
    return total


def sum_on_one_device(
    values: Sequence[ArrayLike],
    device: jax.Device | None,
    add: Callable[[Sequence[jax.Array]], jax.Array] = add_all,
) -> jax.Array:
    """Copies all values to one device and adds them there, in the order of the replicas."""
    with jax.default_device(device):
        return add([as_uncommitted(value) for value in values])


def take_from_one_device(result: Any, destinations: object) -> Any:
    """Returns the plain value if it was to be copied to one device by name; else the copies."""
    named = [destinations] if isinstance(destinations, (str, jax.Device)) else destinations
    if isinstance(result, Mirrored) and isinstance(named, (tuple, list)) and len(named) == 1:
        return result.get()
    return result


def mirror(value: ArrayLike, destinations: object) -> Mirrored:
    """Copies `value` to the devices of `destinations` (devices, names, or a variable)."""
    if jax_private.is_tracer(value) or destinations is None:
        return Mirrored([value])
    value = as_uncommitted(value)
    return Mirrored(
        [
            jax_private.uncommit(jax.device_put(value, device))
            for device in resolve_destinations(destinations)
        ]
    )


def resolve_destinations(destinations: object) -> tuple[jax.Device, ...]:
    """Returns the devices that `destinations` names."""
    if isinstance(destinations, (str, jax.Device)):
        return (resolve_device(destinations),)
    if is_slices(destinations):
        destinations = destinations.values
    if is_wrapped(destinations):
        return tuple(next(iter(piece.devices())) for piece in destinations.values)
    if isinstance(destinations, jax.Array):
        return tuple(destinations.devices())
    if isinstance(destinations, contracts.OnDevices):
        return tuple(resolve_device(device) for device in destinations.devices)
    if isinstance(destinations, (tuple, list)):
        return tuple(resolve_device(device) for device in destinations)
    raise ValueError(
        f"destinations={destinations!r} names no device. Expected a variable, a distributed value, "
        "a device, or a list of devices such as ['CPU:0', 'CPU:1']."
    )

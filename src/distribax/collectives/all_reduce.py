"""The platform's own all-reduce: NCCL on GPUs, Gloo or in-process on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from typing_extensions import override

from distribax import jax_private
from distribax.collectives.cross_device_ops import (
    CrossDeviceOps,
    check_same_shape,
    finish,
    mirror,
    prepare,
    resolve_destinations,
    sum_on_one_device,
)
from distribax.collectives.exchange import can_exchange, sum_by_exchange
from distribax.collectives.packing import PackLimits, choose_pack_limits, reduce_packed
from distribax.topology import REPLICA_AXIS, launch_lock, list_local_devices
from distribax.types import CommunicationOptions, ReduceOp
from distribax.values import Global, Local, Mirrored, PerReplica, find_dtype, settle


class AllReduce(CrossDeviceOps):
    """Reduces with the collective that XLA has for the platform. The default.

    Args:
        num_packs: 0 reduces every tensor by itself. Any other number lets small tensors be joined
            before they are reduced (`CommunicationOptions.bytes_per_pack` limits how many).

    Raises:
        ValueError: `num_packs` is not a count.
    """

    def __init__(self, num_packs: int = 1) -> None:
        if isinstance(num_packs, bool) or not isinstance(num_packs, int) or num_packs < 0:
            raise ValueError(
                f"{type(self).__name__}: num_packs={num_packs!r} is not a count of packs. "
                "Expected an int of at least 0."
            )
        self.num_packs = num_packs

    def sum_in_program(self, values: list[jax.Array], mesh: Mesh) -> list[jax.Array]:
        """Adds the replicas' values of each tensor inside an SPMD program.

        Args:
            values: This replica's arrays.
            mesh: The mesh of the replicas.

        Returns:
            The sums, the same in every replica.
        """
        swapped = [can_exchange(value, mesh) for value in values]
        others = [value for value, swap in zip(values, swapped, strict=True) if not swap]
        sums = iter(lax.psum(tuple(others), REPLICA_AXIS) if others else ())
        return [
            sum_by_exchange(value) if swap else next(sums)
            for value, swap in zip(values, swapped, strict=True)
        ]

    @override
    def all_reduce_in_program(
        self,
        reduce_op: ReduceOp,
        values: list[jax.Array],
        mesh: Mesh,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        def add_up(values: list[jax.Array]) -> list[jax.Array]:
            own = [jax_private.to_varying(value, REPLICA_AXIS) for value in values]
            return self.sum_in_program(own, mesh)

        ready = [jnp.asarray(prepare(value, reduce_op)) for value in values]
        if self.num_packs == 0:
            sums = add_up(ready)
        else:
            limits = choose_pack_limits(mesh)
            if options.bytes_per_pack:
                limits = PackLimits(limits.tensor, options.bytes_per_pack)
            sums = reduce_packed(ready, add_up, limits)
        return [
            finish(total, reduce_op, mesh.size, jnp.result_type(value))
            for total, value in zip(sums, values, strict=True)
        ]

    @override
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica | Mirrored,
        destinations: object,
        options: CommunicationOptions,
    ) -> Mirrored:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    @override
    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica | Mirrored, object]],
        options: CommunicationOptions,
    ) -> list[Mirrored]:
        values = [value for value, _ in value_destination_pairs]
        layout = values[0].layout
        if isinstance(layout, Local):
            layouts = [value.layout for value in values]
            local = [each.value for each in layouts if isinstance(each, Local)]
            reduced = self.all_reduce_in_program(reduce_op, local, layout.mesh, options)
            return [Mirrored.of(Local(value, layout.mesh)) for value in reduced]
        settle(values)
        for value in values:
            check_same_shape(value)
        joined = _join_on_one_mesh(values)
        if joined is None:
            # The values are not spread over a mesh (Python numbers, several on one device).
            return [
                mirror(
                    finish(
                        sum_on_one_device(
                            [prepare(each, reduce_op) for each in value.values], None
                        ),
                        reduce_op,
                        len(value.values),
                        find_dtype(value.layout),
                    ),
                    destinations,
                )
                for value, destinations in value_destination_pairs
            ]
        mesh = joined[0].mesh
        program = _make_reduce_program(
            self, reduce_op, mesh, options, tuple((g.mirrored, g.stacked) for g in joined)
        )
        arrays = [each.array for each in joined]
        recorded = jax_private.joint_calls.record_for(
            lambda: f"{reduce_op} of {', '.join(str(jax.typeof(array)) for array in arrays)}",
            *arrays,
            limit=options.timeout_seconds,
        )
        with recorded as call, launch_lock, jax_private.leave_mesh():
            results = program(arrays)
            call.set_results(results)
        return [
            _place(Global(array, mesh, mirrored=True), destinations)
            for array, (_, destinations) in zip(results, value_destination_pairs, strict=True)
        ]

    # Cached programs are keyed by the algorithm; two of the same kind are interchangeable.

    @override
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    @override
    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items()))))


NcclAllReduce = AllReduce


@lru_cache(maxsize=512)
def _make_reduce_program(
    ops: AllReduce,
    reduce_op: ReduceOp,
    mesh: Mesh,
    options: CommunicationOptions,
    layouts: tuple[tuple[bool, bool], ...],
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    def body(values: list[jax.Array]) -> list[jax.Array]:
        local = [
            value[0] if stacked else value
            for value, (_, stacked) in zip(values, layouts, strict=True)
        ]
        return ops.all_reduce_in_program(reduce_op, local, mesh, options)

    same, split = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    specs = [same if mirrored else split for mirrored, _ in layouts]
    return jax.jit(jax_private.shard_map(body, mesh, (specs,), [same] * len(layouts)))


def _join_on_one_mesh(values: Sequence[PerReplica | Mirrored]) -> list[Global] | None:
    first = values[0].layout if isinstance(values[0].layout, Global) else values[0].join()
    if first is None:
        return None
    layouts = [value.on_mesh(first.mesh) for value in values]
    return None if any(layout is None for layout in layouts) else layouts  # type: ignore[return-value]


def _place(result: Global, destinations: object) -> Mirrored:
    if destinations is None or jax_private.is_tracer(result.array):
        return Mirrored.of(result)
    devices = resolve_destinations(destinations)
    if devices == list_local_devices(result.mesh):
        return Mirrored.of(result)
    # From the copy that is on the device already, if there is one.
    near = {piece.device: piece for piece in result.pieces}
    return Mirrored(
        [
            jax_private.uncommit(jax.device_put(near.get(device, result.pieces[0]), device))
            for device in devices
        ]
    )

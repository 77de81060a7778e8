"""How the values of all replicas are stored: as pieces, as one global array, or in a program.

A `PerReplica` or `Mirrored` has one of these layouts; code that combines values asks the layout and
never the wrapper's type.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from distribax import jax_private
from distribax.errors import HostMode, HostOnly
from distribax.topology import REPLICA_AXIS, list_local_devices

Shape: TypeAlias = tuple[int, ...]
"""The shape of an array."""

HostValue: TypeAlias = int | float | complex | np.ndarray | np.generic
"""A value that is on no device."""


class Evenness(enum.Enum):
    """Whether the pieces of other processes have the same shape as those of this one."""

    UNKNOWN = enum.auto()
    EVEN = enum.auto()
    UNEVEN = enum.auto()
    """They cannot be one array."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """One Python object per replica: arrays of any shape, or anything else.

    Attributes:
        pieces: The objects.
        mesh: The mesh of the strategy whose replicas made them, if known.
        evenness: Whether pieces of other processes have the same shape.
    """

    pieces: tuple[Any, ...]
    mesh: Mesh | None = None
    evenness: Evenness = Evenness.UNKNOWN


@dataclass(frozen=True, eq=False)
class Global:
    """One `jax.Array` over the mesh, or its tracer outside the replicas of a compiled step.

    Pieces with dimensions are joined along dimension 0 (`stacked=False`), scalars are stacked into
    a vector (`stacked=True`). A mirrored array has the whole value as each piece.
    """

    array: Any
    mesh: Mesh
    stacked: bool = False
    mirrored: bool = False

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec() if self.mirrored else PartitionSpec(REPLICA_AXIS)

    @cached_property
    def pieces(self) -> tuple[Any, ...]:
        if jax_private.is_tracer(self.array):
            count = self.mesh.size
            if self.mirrored:
                return (self.array,) * count
            return tuple(self.array) if self.stacked else tuple(jnp.split(self.array, count))
        # Kept, so they must not belong to what happens to be traced now.
        return jax_private.run_outside_trace(self._split)

    def _split(self) -> tuple[jax.Array, ...]:
        blocks = jax_private.split_by_device(self.array)
        # Indexed while they are bound to their devices, so that each stays where it is.
        with jax_private.leave_mesh():
            own = [block[0] for block in blocks] if self.stacked else blocks
        return tuple(map(jax_private.uncommit, own))


@dataclass(frozen=True, eq=False)
class Padded:
    """Pieces of different shapes as one `jax.Array` over the mesh, or its tracer.

    Each piece is padded to the largest size of each dimension; they are joined along dimension 0.

    Attributes:
        array: The array.
        mesh: The mesh of the replicas.
        shapes: The shapes of the pieces, by replica, those of all processes included.
    """

    array: Any
    mesh: Mesh
    shapes: tuple[Shape, ...]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(REPLICA_AXIS)

    @cached_property
    def pieces(self) -> tuple[Any, ...]:
        if jax_private.is_tracer(self.array):
            return self._cut(jnp.split(self.array, self.mesh.size), self.shapes)
        blocks = jax_private.split_by_device(self.array)
        shapes = [self.shapes[index] for index in find_local_replicas(self.mesh)]
        # Kept, so they must not belong to what happens to be traced now.
        return jax_private.run_outside_trace(lambda: self._cut(blocks, shapes))

    def _cut(self, blocks: Sequence[jax.Array], shapes: Sequence[Shape]) -> tuple[jax.Array, ...]:
        # Cut while they are bound to their devices, so that each stays where it is.
        own = [cut_to(block, shape) for block, shape in zip(blocks, shapes, strict=True)]
        return tuple(map(jax_private.uncommit, own))


@dataclass(frozen=True, eq=False)
class Local:
    """This replica's own value while an SPMD program is traced; the others are behind a gather.

    Attributes:
        value: The value.
        mesh: The mesh of the replicas.
        shapes: The shapes of all replicas' values, if they differ.
    """

    value: Any
    mesh: Mesh
    shapes: tuple[Shape, ...] | None = None

    @cached_property
    def pieces(self) -> tuple[Any, ...]:
        if not jax_private.is_tracer(self.value):
            return (self.value,) * self.mesh.size
        own = jax_private.to_varying(self.value, REPLICA_AXIS)
        if self.shapes is None:
            return tuple(jax_private.all_gather_same(own, REPLICA_AXIS))
        padded = jax_private.pad_to(own, find_largest(self.shapes))
        everyone = jax_private.all_gather_same(padded, REPLICA_AXIS)
        return tuple(cut_to(each, to) for each, to in zip(everyone, self.shapes, strict=True))


Layout: TypeAlias = Pieces | Global | Padded | Local
"""The stored values of the replicas of one process."""


def gather_joined(local: Local, axis: int) -> jax.Array:
    """Joins the replicas' values along a dimension, inside an SPMD program."""
    if local.shapes is not None:
        return jnp.concatenate(local.pieces, axis=axis)
    own = jax_private.to_varying(local.value, REPLICA_AXIS)
    return jax_private.all_gather_joined(own, REPLICA_AXIS, axis)


def describe_kind(piece: object) -> str:
    """Describes what pieces must have in common to be one array."""
    if isinstance(piece, jax.Array) or is_host_value(piece):
        return f"{jnp.shape(piece)} {jax.dtypes.result_type(piece)}"
    return type(piece).__name__


def is_traced(layout: Layout) -> bool:
    """Tells whether the values are those of a function that is being traced."""
    if isinstance(layout, (Global, Padded)):
        return jax_private.is_tracer(layout.array)
    return isinstance(layout, Local) or any(map(jax_private.is_tracer, layout.pieces))


def get_local_pieces(layout: Layout) -> tuple[Any, ...]:
    """Returns the pieces of this process's replicas, also in a program that all processes run."""
    mesh = layout.mesh
    if isinstance(layout, Pieces) or mesh is None or not mesh.is_multi_process:
        return layout.pieces
    if not is_traced(layout):
        return layout.pieces
    if not isinstance(layout, Global):
        if layout.shapes is not None:
            raise HostOnly("the processes' pieces of a value differ in shape", HostMode.EAGER)
        return _gather_local(layout.value, mesh)
    stacked = layout.stacked
    pick = jax_private.shard_map(
        lambda own: list(_gather_local(own[0] if stacked else own, mesh)),
        mesh,
        (layout.spec,),
        [PartitionSpec()] * _count_local(mesh),
    )
    return tuple(pick(layout.array))


def _gather_local(own: ArrayLike, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Returns, inside an SPMD program, the values of the replicas in the same process."""
    processes = [device.process_index for device in mesh.devices.flat]
    firsts = jnp.asarray([processes.index(process) for process in processes])
    everyone = jax_private.all_gather_same(jnp.asarray(own), REPLICA_AXIS)
    first = firsts[jax.lax.axis_index(REPLICA_AXIS)]
    return tuple(everyone[first + index] for index in range(_count_local(mesh)))


def _count_local(mesh: Mesh) -> int:
    """Returns how many replicas each process has."""
    counts = Counter(device.process_index for device in mesh.devices.flat)
    if len(set(counts.values())) > 1:
        raise ValueError(
            "experimental_local_results: the workers have different numbers of devices "
            f"({dict(counts)} by worker), and a compiled function is one program for all. Return "
            "the value from the function, and split it outside."
        )
    return counts[jax.process_index()]


def join(pieces: tuple[object, ...], mesh: Mesh, *, mirrored: bool = False) -> Global | None:
    """Joins single-device arrays of one shape into a global array; None if they do not fit.

    The buffers are used where they are: nothing is copied but scalars, which get a dimension.
    """
    arrays = [piece for piece in pieces if isinstance(piece, jax.Array)]
    if len(arrays) != len(pieces):
        return None
    if any(map(jax_private.is_tracer, arrays)):
        return _join_traced(arrays, mesh, mirrored=mirrored)
    first, local = arrays[0], list_local_devices(mesh)
    if len(local) != len(arrays):
        return None
    for piece, device in zip(arrays, local, strict=True):
        if piece.shape != first.shape or piece.dtype != first.dtype:
            return None
        if piece.devices() != {device} and not mesh.is_multi_process:
            return None
    if mesh.is_multi_process:
        # A process cannot go another way than the others because of where its pieces are.
        arrays = [
            piece if piece.devices() == {device} else jax_private.move_to_device(piece, device)
            for piece, device in zip(arrays, local, strict=True)
        ]
    if mirrored:
        same = NamedSharding(mesh, PartitionSpec())
        array = jax_private.join_by_device(first.shape, same, arrays)
        return Global(array, mesh, mirrored=True)
    stacked = first.ndim == 0
    blocks = [jax_private.add_dim(piece) for piece in arrays] if stacked else arrays
    shape = (blocks[0].shape[0] * mesh.size, *blocks[0].shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    array = jax_private.join_by_device(shape, sharding, blocks)
    return Global(array, mesh, stacked=stacked)


def _join_traced(pieces: list[jax.Array], mesh: Mesh, *, mirrored: bool) -> Global | None:
    """Joins arrays that a step computes outside its replicas."""
    first = pieces[0]
    if mesh.is_multi_process and len(pieces) == len(list_local_devices(mesh)):
        # One for each replica of a process: the same in all, as the program is.
        pieces = pieces * (mesh.size // len(pieces))
    if mesh.size != len(pieces):
        return None
    if any(piece.shape != first.shape or piece.dtype != first.dtype for piece in pieces):
        return None
    if mirrored:
        return Global(first, mesh, mirrored=True)
    stacked = first.ndim == 0
    array = jnp.stack(pieces) if stacked else jnp.concatenate(pieces)
    return Global(array, mesh, stacked=stacked)


def spread(pieces: tuple[object, ...], mesh: Mesh) -> Global | None:
    """Puts numbers and host arrays of one shape on the mesh; None if they do not fit."""
    local = list_local_devices(mesh)
    given = [np.asarray(piece) for piece in pieces if is_host_value(piece)]
    if not len(local) == len(pieces) == len(given):
        return None
    blocks = [np.atleast_1d(piece) for piece in given]
    blocks = [block.astype(jax.dtypes.canonicalize_dtype(block.dtype)) for block in blocks]
    if any(b.shape != blocks[0].shape or b.dtype != blocks[0].dtype for b in blocks):
        return None
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    if len(local) == mesh.size:
        array = jax.device_put(np.concatenate(blocks), sharding)
    else:
        array = jax.make_array_from_process_local_data(sharding, np.concatenate(blocks))
    return Global(array, mesh, stacked=given[0].ndim == 0)


def pad(pieces: tuple[object, ...], mesh: Mesh, shapes: Sequence[Shape]) -> Padded | None:
    """Joins arrays of different shapes into a padded global array; None if they do not fit.

    Args:
        pieces: The arrays of this process's replicas.
        mesh: The mesh of the replicas.
        shapes: The shapes of all replicas' pieces.
    """
    local = list_local_devices(mesh)
    arrays = [piece for piece in pieces if isinstance(piece, (jax.Array, np.ndarray))]
    if not len(local) == len(arrays) == len(pieces):
        return None
    if len({len(shape) for shape in shapes}) > 1 or len({piece.dtype for piece in arrays}) > 1:
        return None
    if any(map(jax_private.is_key, arrays)) or arrays[0].dtype == object:
        return None
    largest = find_largest(shapes)
    if any(map(jax_private.is_tracer, arrays)):
        blocks = [jax_private.pad_to(jnp.asarray(piece), largest) for piece in arrays]
        joined = None if mesh.is_multi_process else jnp.concatenate(blocks)
        return None if joined is None else Padded(joined, mesh, tuple(shapes))
    blocks = [_put_padded(p, device, largest) for p, device in zip(arrays, local, strict=True)]
    whole = (largest[0] * mesh.size, *largest[1:])
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    array = jax.make_array_from_single_device_arrays(whole, sharding, blocks)
    return Padded(array, mesh, tuple(shapes))


def _put_padded(piece: jax.Array | np.ndarray, device: jax.Device, shape: Shape) -> jax.Array:
    """Returns a piece on a device, padded to `shape`."""
    if isinstance(piece, np.ndarray):
        padded = np.zeros(shape, piece.dtype)
        padded[tuple(map(slice, piece.shape))] = piece
        return jax.device_put(padded, device)
    with jax.default_device(device):
        padded_there = jax_private.pad_to(jax_private.move_to_device(piece, device), shape)
    return jax.device_put(padded_there, device)


def find_largest(shapes: Sequence[Shape]) -> Shape:
    """Returns the largest size of each dimension."""
    return tuple(map(max, zip(*shapes, strict=True)))


def cut_to(array: jax.Array, shape: Shape) -> jax.Array:
    """Returns a piece without what pads it."""
    return array if array.shape == shape else array[tuple(map(slice, shape))]


def find_local_replicas(mesh: Mesh) -> list[int]:
    """Returns the indices of this process's replicas."""
    own = jax.process_index()
    return [i for i, device in enumerate(mesh.devices.flat) if device.process_index == own]


def find_replicas(pieces: Sequence[object], mesh: Mesh | None) -> Sequence[int]:
    """Returns the indices of the replicas whose pieces these are: all there are, or local ones."""
    if mesh is None or not mesh.is_multi_process or len(pieces) == mesh.size:
        return range(len(pieces))
    return find_local_replicas(mesh)


def is_host_value(piece: object) -> TypeGuard[HostValue]:
    """Tells whether a piece is a Python or NumPy number, or a NumPy array."""
    return isinstance(piece, (int, float, complex, np.ndarray, np.generic))


def copy_to_mesh(value: ArrayLike, mesh: Mesh) -> jax.Array:
    """Returns `value` copied to every device of the mesh."""
    if isinstance(value, jax.Array) and not jax_private.is_tracer(value):
        value = jax_private.uncommit(jax_private.pick_copy(value))
    local, same = list_local_devices(mesh), NamedSharding(mesh, PartitionSpec())
    if len(local) == mesh.size:
        return jax.device_put(value, same)
    pieces = [jax.device_put(value, device) for device in local]
    return jax.make_array_from_single_device_arrays(pieces[0].shape, same, pieces)

"""Placements: where the copies of a variable live, and how they enter a compiled program."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.topology import REPLICA_AXIS, device_name, list_local_devices
from distribax.values import DistributedValues, copy_to_mesh


class Placement(contracts.Placement):
    """One value in this process, unless a subclass says otherwise.

    Subclasses say how a whole value becomes a buffer and what each copy of it is.
    """

    per_replica = False
    has_copies = False
    is_program_form = False
    label = "Variable"
    source: contracts.Source | None = None
    specs: tuple[contracts.StoredSpec, ...] = ()
    mesh: Mesh | None = None
    sharding: Sharding | None = None

    @property
    @abc.abstractmethod
    @override
    def devices(self) -> tuple[jax.Device, ...]: ...

    @property
    @override
    def device_names(self) -> tuple[str, ...]:
        return tuple(device_name(device) for device in self.devices)

    @override
    def place_beside(self) -> contracts.Placement:
        return self

    @override
    def refresh(self, buffer: jax.Array) -> jax.Array:
        return buffer

    @abc.abstractmethod
    @override
    def store(self, value: jax.typing.ArrayLike) -> jax.Array: ...

    @override
    def store_initial(self, value: jax.typing.ArrayLike) -> jax.Array:
        return self.store(value)

    @override
    def split(self, buffer: jax.Array) -> list[jax.Array]:
        return [jax_private.uncommit(buffer)]

    @override
    def join(self, pieces: Sequence[jax.Array], like: jax.Array) -> jax.Array:
        return pieces[0]

    @override
    def to_program(self, buffer: jax.Array) -> jax.Array:
        return buffer

    @override
    def from_program(self, value: jax.Array) -> jax.Array:
        return value

    @property
    @override
    def num_copies(self) -> int:
        return len(self.devices)

    @property
    @override
    def spans_processes(self) -> bool:
        return self.num_copies > len(self.devices)


class Single(Placement):
    """One value on one device; without a device, wherever JAX puts it."""

    def __init__(self, device: jax.Device | None) -> None:
        self._device = device

    @property
    @override
    def devices(self) -> tuple[jax.Device, ...]:
        device = self._device or jax_private.get_default_device()
        # JAX takes a platform's name as its default device too.
        known = isinstance(device, jax.Device)
        return (device if known else jax.local_devices(backend=device)[0],)

    @override
    def store(self, value: jax.typing.ArrayLike) -> jax.Array:
        if self._device is None:
            return jnp.array(value)
        return jax_private.uncommit(jax.device_put(np.array(value), self._device, may_alias=False))

    @override
    def join(self, pieces: Sequence[jax.Array], like: jax.Array) -> jax.Array:
        return self._move_here(pieces[0])

    @override
    def to_program(self, buffer: jax.Array) -> jax.Array:
        # Bound to no device, as a step of any strategy may read it.
        return jax_private.uncommit(jax_private.pick_copy(buffer)) if buffer.committed else buffer

    @override
    def from_program(self, value: jax.Array) -> jax.Array:
        return self._move_here(value)

    def _move_here(self, value: jax.Array) -> jax.Array:
        # The quick way out: it is taken for every variable at every call of a compiled step.
        if self._device is None or (not value.committed and value.device == self._device):
            return value
        return jax_private.uncommit(jax_private.move_to_device(value, self._device))


class Replicated(Placement):
    """The same value on every device of the mesh, kept the same by every write."""

    has_copies = True
    is_program_form = True
    label = "MirroredVariable"
    mesh: Mesh
    sharding: NamedSharding

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sharding = NamedSharding(mesh, PartitionSpec())

    @property
    @override
    def devices(self) -> tuple[jax.Device, ...]:
        return list_local_devices(self.mesh)

    @property
    @override
    def num_copies(self) -> int:
        return self.mesh.size

    @override
    def store_initial(self, value: jax.typing.ArrayLike) -> jax.Array:
        if self.spans_processes:
            value = jax_private.broadcast_from_first(np.asarray(value))
        return self.store(value)

    @override
    def store(self, value: jax.typing.ArrayLike) -> jax.Array:
        if isinstance(value, jax.Array) and value.sharding == self.sharding:
            return value
        return copy_to_mesh(value, self.mesh)

    @override
    def split(self, buffer: jax.Array) -> list[jax.Array]:
        return [jax_private.uncommit(piece) for piece in jax_private.split_by_device(buffer)]

    @override
    def join(self, pieces: Sequence[jax.Array], like: jax.Array) -> jax.Array:
        placed = [
            jax.device_put(piece, device)
            for piece, device in zip(pieces, list_local_devices(self.mesh), strict=True)
        ]
        return jax.make_array_from_single_device_arrays(like.shape, self.sharding, placed)


class Stacked(Replicated):
    """A value of its own for each replica, stacked along a first dimension over the mesh."""

    per_replica = True
    label = "SyncOnReadVariable"

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))

    @override
    def store(self, value: jax.typing.ArrayLike) -> jax.Array:
        block = np.asarray(value)[None]
        shape = (self.num_copies, *block.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, lambda _: block)

    @override
    @jax_private.leave_mesh()
    def split(self, buffer: jax.Array) -> list[jax.Array]:
        return [jax_private.uncommit(piece[0]) for piece in jax_private.split_by_device(buffer)]

    @override
    @jax_private.leave_mesh()
    def join(self, pieces: Sequence[jax.Array], like: jax.Array) -> jax.Array:
        return super().join([jax_private.add_dim(piece) for piece in pieces], like)


class Central(Placement):
    """One value on the parameter device; a compiled step copies it to the mesh and back."""

    label = "CentralVariable"
    mesh: Mesh
    sharding: NamedSharding

    def __init__(self, device: jax.Device, mesh: Mesh) -> None:
        self._device = device
        self.mesh = mesh
        self.sharding = NamedSharding(mesh, PartitionSpec())

    @property
    @override
    def devices(self) -> tuple[jax.Device, ...]:
        return (self._device,)

    @override
    def store(self, value: jax.typing.ArrayLike) -> jax.Array:
        if isinstance(value, jax.Array):
            value = jax_private.pick_copy(value)
        return jax.device_put(value, self._device)

    @override
    def join(self, pieces: Sequence[jax.Array], like: jax.Array) -> jax.Array:
        return jax.device_put(pieces[0], self._device)

    @override
    def to_program(self, buffer: jax.Array) -> jax.Array:
        return jax.device_put(buffer, self.sharding)

    @override
    def from_program(self, value: jax.Array) -> jax.Array:
        near = {piece.device: piece for piece in jax_private.split_by_device(value)}
        return jax.device_put(near.get(self._device, next(iter(near.values()))), self._device)


class PlacedVariable(contracts.Variable, Protocol):
    """A variable whose copies live where its placement says."""

    counts_idle: bool
    """Whether an ON_READ variable takes what a replica with an empty piece writes."""

    @property
    def placement(self) -> contracts.Placement:
        """Where the copies live."""

    @property
    def trainable(self) -> bool:
        """Whether optimizers should change the variable."""

    @property
    def constraint(self) -> Callable[[jax.Array], jax.typing.ArrayLike] | None:
        """The function that optimizers apply to the value after each update, or None."""

    @property
    def device(self) -> str:
        """The name of the device of the first copy."""

    @property
    @override
    def row_shards(self) -> Sequence[tuple[int, PlacedVariable]]:
        """The variables that have the rows, each with the index of its first row."""

    def distributed(self) -> DistributedValues:
        """Returns the copies as a distributed value."""

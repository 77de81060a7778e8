"""Distributed values that a function has not been given, but found: in a closure, an attribute.

In a replica such a value stands for the replica's own part. A compiled program takes it as an
input, like a variable that is only read: an array over several processes can be no constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from typing_extensions import override

from distribax import context, jax_private
from distribax.errors import HostMode, HostOnly, NeedsOwnMesh
from distribax.execution.traces import frames
from distribax.topology import REPLICA_AXIS
from distribax.values import (
    DistributedValues,
    Form,
    Global,
    Layout,
    Local,
    Mirrored,
    Padded,
    PerReplica,
    register_own_part,
)
from distribax.values.layout import is_traced


@dataclass(frozen=True, eq=False)
class CapturedValue:
    """A distributed value as the state of a compiled program, which reads it at every call."""

    value: DistributedValues
    layout: Global | Padded

    per_replica = False
    source = None

    # Each time it is met, it is the same state. The object is kept, so that its id stays its own.

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturedValue) and self.value is other.value

    @override
    def __hash__(self) -> int:
        return id(self.value)

    @property
    def program_sharding(self) -> Sharding:
        return NamedSharding(self.layout.mesh, self.layout.spec)

    @property
    def described(self) -> str:
        return f"a captured {type(self.value).__name__}"

    def program_value(self) -> jax.Array:
        array: jax.Array = self.layout.array
        return array

    def program_type(self) -> jax_private.ArrayType:
        return jax_private.get_array_type(self.layout.array)

    def take_program_value(self) -> jax.Array:
        raise AssertionError("a captured value is never written")

    def store_program_value(self, value: Any) -> None:
        raise AssertionError("a captured value is never written")

    def take_local(self, value: jax.Array) -> jax.Array:
        """Returns a replica's part, given what a replica gets of the array."""
        assert isinstance(self.layout, Global)
        return value[0] if self.layout.stacked else value


def lift(value: DistributedValues, mesh: Mesh | None = None) -> Any:
    """Returns a distributed value as the code that runs now can compute with it.

    While a function is traced, a value that is no part of the trace becomes an input of the
    program; in the program of the replicas it is each replica's own part.

    Args:
        value: The value.
        mesh: The mesh that it is for; by default, that of the devices it is on.
    """
    frame = frames.current()
    if frame is None or isinstance(value.layout, Local):
        return value
    if isinstance(frame, frames.RunFrame):
        if isinstance(value, Mirrored):
            return Mirrored.of(Local(value.get(), frame.mesh))
        return PerReplica.of(Local(read_in_program(value, frame), frame.mesh))
    if jax_private.has_mesh():
        raise NeedsOwnMesh
    if is_traced(value.layout):
        return value
    mesh = mesh or value.layout.mesh
    state = _find_state(value, mesh)
    if state is None:
        padded = jax_private.run_outside_trace(lambda: value.pad(mesh))
        if padded is None:
            return value
        state = CapturedValue(value, padded)
    return Form.of(value, state.layout).wrap(frame.read(state))


def find_known(frame: frames.FunctionFrame, mesh: Mesh) -> list[CapturedValue]:
    """Returns the values that replicas on a mesh have found in an earlier trace."""
    return [
        state
        for state in frame.captured
        if isinstance(state, CapturedValue)
        and isinstance(state.layout, Global)
        and state.layout.mesh == mesh
    ]


def find_own_part(value: DistributedValues) -> Any:
    """Returns the part of the replica that runs now; None outside the replicas."""
    here = context.current()
    if here.replica_context is None or here.strategy.extended.single:
        return None
    frame = frames.current()
    if isinstance(frame, frames.RunFrame):
        layout = value.layout
        return layout.value if isinstance(layout, Local) else read_in_program(value, frame)
    extended, index = here.strategy.extended, here.replica_context.runner.copy_id
    value.require_replicas(len(extended.local_devices))
    return jax_private.move_to_device(value.part(index), extended.local_devices[index])


register_own_part(find_own_part)


def read_in_program(value: DistributedValues, frame: frames.RunFrame) -> Any:
    """Returns a replica's part of a value that its program has not been given."""
    if is_traced(value.layout):
        if isinstance(value.layout, Padded):
            raise HostOnly("the replicas' pieces of a value differ in shape", HostMode.EAGER)
        return _pick_own(value.layout, lax.axis_index(REPLICA_AXIS))
    state = _find_state(value, frame.mesh)
    if state is None:
        raise HostOnly("the replicas' pieces of a value differ in shape", HostMode.EAGER)
    if state not in frame.values:
        # Not an input of the replicas yet, so the function is traced again: only the type matters.
        frame.function.captured[state] = None
        frame.function.is_incomplete = True
        own = jnp.copy(value.values[0])
        if jax_private.get_innermost_trace() is not frame.trace:
            return own
        frame.values[state] = own
    frame.function.touched[state] = None
    return frame.values[state]


def _pick_own(layout: Layout, index: jax.Array) -> jax.Array:
    """Returns a replica's part of what the same function has computed outside its replicas."""
    if not isinstance(layout, Global) or layout.stacked:
        # Not the layout's own pieces: it would keep those of this trace.
        return jnp.stack(layout.array if isinstance(layout, Global) else layout.pieces)[index]
    size = layout.array.shape[0] // layout.mesh.size
    return lax.dynamic_slice_in_dim(layout.array, index * size, size)


def _find_state(value: DistributedValues, mesh: Mesh | None) -> CapturedValue | None:
    """Returns the value as a state, or None if it cannot be one array over the mesh."""
    if isinstance(value.layout, Global) and mesh in (None, value.layout.mesh):
        return CapturedValue(value, value.layout)
    # Outside the trace, so that it is an array and no value of the trace.
    layout = jax_private.run_outside_trace(
        lambda: value.join() if mesh is None else value.on_mesh(mesh)
    )
    return None if layout is None else CapturedValue(value, layout)

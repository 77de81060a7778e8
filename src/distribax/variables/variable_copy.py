"""The copies of a variable: each on its device, and all as a distributed value."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from typing_extensions import override

from distribax.execution import frames
from distribax.topology import device_name, list_local_devices
from distribax.values import (
    ArrayLike,
    DistributedValues,
    Global,
    Local,
    Mirrored,
    PerReplica,
    Pieces,
)
from distribax.variables.placement import PlacedVariable


class VariableCopy(ArrayLike):
    """One device's copy of a variable, to look at."""

    def __init__(self, variable: PlacedVariable, index: int) -> None:
        self.variable = variable
        self._index = index

    @property
    def name(self) -> str:
        """The variable's name, with the replica's index after the first."""
        plain = self.variable.name.removesuffix(":0")
        return f"{plain}:0" if self._index == 0 else f"{plain}/replica_{self._index}:0"

    @property
    def device(self) -> str:
        """The name of the device that this copy is on."""
        if self.variable.source is not None:
            return self.variable.device
        return device_name(next(iter(self._read_stored().devices())))

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.variable.shape

    @property
    @override
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""
        return self.variable.dtype

    def _read_stored(self) -> jax.Array:
        return self.variable.placement.split(self.variable.share())[self._index]

    def read_value(self) -> jax.Array:
        """Returns this copy's value."""
        if frames.current() is not None:
            # What is stored would be a constant of the compiled step.
            return self.variable.distributed().values[self._index]
        return self._read_stored()

    def value(self) -> jax.Array:
        """Returns this copy's value."""
        return self.read_value()

    @override
    def __jax_array__(self) -> jax.Array:
        return self.read_value()

    @override
    def __repr__(self) -> str:
        shape, dtype = self.variable.shape, np.dtype(self.variable.dtype).name
        value = np.array(self._read_stored())
        # A scalar's own repr names its type, which is said already: numpy=1.0, as in TensorFlow.
        shown = repr(value) if value.ndim else str(value[()])
        return f"<dx.Variable {self.name!r} shape={shape} dtype={dtype}, numpy={shown}>"


def wrap_copies(variable: PlacedVariable) -> DistributedValues:
    """Returns the copies of a variable as a distributed value."""
    frame = frames.current()
    value = frame.read(variable) if frame is not None else variable.share()
    mesh, shape = variable.placement.mesh, variable.shape
    if isinstance(frame, frames.RunFrame):
        kind = PerReplica if variable.per_replica else Mirrored
        return kind.of(Local(value, frame.mesh))
    if mesh is None or variable.devices != list_local_devices(mesh):
        return Mirrored([value])
    if not variable.per_replica:
        return Mirrored.of(Global(value, mesh, mirrored=True))
    if not shape:
        return PerReplica.of(Global(value, mesh, stacked=True))
    if frame is None:
        return PerReplica.of(Pieces(tuple(variable.placement.split(value)), mesh))
    joined = (mesh.size * shape[0], *shape[1:])
    return PerReplica.of(Global(value.reshape(joined), mesh))

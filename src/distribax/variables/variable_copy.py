"""One device's copy of a variable."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np
from typing_extensions import override

from distribax.execution import frames
from distribax.topology import device_name
from distribax.values import ArrayLike, DistributedValues
from distribax.variables.placement import PlacedVariable


class CopiedVariable(PlacedVariable, Protocol):
    """A variable whose copies can be looked at."""

    @property
    def device(self) -> str:
        """The name of the device of the first copy."""

    def distributed(self) -> DistributedValues:
        """Returns the copies as a distributed value."""


class VariableCopy(ArrayLike):
    """One device's copy of a variable, to look at."""

    def __init__(self, variable: CopiedVariable, index: int) -> None:
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
        return device_name(next(iter(self._stored().devices())))

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

    def _stored(self) -> jax.Array:
        return self.variable.placement.pieces(self.variable.share())[self._index]

    def read_value(self) -> jax.Array:
        """Returns this copy's value."""
        if frames.current() is not None:
            # What is stored would be a constant of the compiled step.
            return self.variable.distributed().values[self._index]
        return self._stored()

    def value(self) -> jax.Array:
        """Returns this copy's value."""
        return self.read_value()

    @override
    def __jax_array__(self) -> jax.Array:
        return self.read_value()

    @override
    def __repr__(self) -> str:
        shape, dtype = self.variable.shape, np.dtype(self.variable.dtype).name
        value = np.array(self._stored())
        # A scalar's own repr names its type, which is said already: numpy=1.0, as in TensorFlow.
        shown = repr(value) if value.ndim else str(value[()])
        return f"<dx.Variable {self.name!r} shape={shape} dtype={dtype}, numpy={shown}>"

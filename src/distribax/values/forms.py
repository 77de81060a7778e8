"""Forms: distributed values without their arrays, which compiled programs are specialised for."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from distribax.values.distributed import DistributedValues, Mirrored, PerReplica
from distribax.values.idle import NONE_IDLE, IdleReplicas
from distribax.values.layout import Global, Padded, Shape


class Form(NamedTuple):
    """A value that is stored as one array over the mesh, without the array.

    Attributes:
        mesh: The mesh of the replicas.
        mirrored: Whether all replicas have the same value.
        stacked: Whether the replicas' values are scalars, stacked into a vector.
        shapes: The shapes of the replicas' values, if these are padded to one shape.
        idle: The replicas that were idle in the run that made the value.
    """

    mesh: Mesh
    mirrored: bool = False
    stacked: bool = False
    shapes: tuple[Shape, ...] | None = None
    idle: frozenset[int] = frozenset()

    @classmethod
    def of(cls, value: DistributedValues, layout: Global | Padded) -> Form:
        """Returns the form of a value that is stored as `layout`."""
        idle = value.idle.find()
        if isinstance(layout, Padded):
            return cls(layout.mesh, shapes=layout.shapes, idle=idle)
        return cls(layout.mesh, layout.mirrored, layout.stacked, idle=idle)

    def wrap(self, array: jax.Array) -> DistributedValues:
        """Returns a value of this form that holds `array`."""
        layout: Global | Padded
        if self.shapes is None:
            layout = Global(array, self.mesh, stacked=self.stacked, mirrored=self.mirrored)
        else:
            layout = Padded(array, self.mesh, self.shapes)
        wrapper = Mirrored if self.mirrored else PerReplica
        return wrapper.of(layout, IdleReplicas(self.idle) if self.idle else NONE_IDLE)

"""Forms: distributed values without their arrays, which compiled programs are specialised for."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh, PartitionSpec

from distribax.topology import REPLICA_AXIS
from distribax.values.distributed import DistributedValues, Mirrored, PerReplica
from distribax.values.idle import NONE_IDLE, IdleReplicas
from distribax.values.layout import Global, Padded, Shape


@dataclass(frozen=True)
class GlobalForm:
    """A wrapped global array without the array: what a compiled program is specialised for."""

    wrapper: type[DistributedValues]
    mesh: Mesh
    stacked: bool
    mirrored: bool
    idle: frozenset[int] = frozenset()

    @property
    def spec(self) -> PartitionSpec:
        """How the array is spread over the mesh."""
        return PartitionSpec() if self.mirrored else PartitionSpec(REPLICA_AXIS)

    def wrap(self, array: jax.Array) -> DistributedValues:
        """Returns a value of this form that holds `array`."""
        layout = Global(array, self.mesh, stacked=self.stacked, mirrored=self.mirrored)
        return self.wrapper.of(layout, _restore_idle(self.idle))


@dataclass(frozen=True)
class PaddedForm:
    """A wrapped padded array without the array: what a compiled program is specialised for."""

    mesh: Mesh
    shapes: tuple[Shape, ...]
    idle: frozenset[int] = frozenset()

    @property
    def spec(self) -> PartitionSpec:
        """How the array is spread over the mesh."""
        return PartitionSpec(REPLICA_AXIS)

    def wrap(self, array: jax.Array) -> DistributedValues:
        """Returns a value of this form that holds `array`."""
        layout = Padded(array, self.mesh, self.shapes)
        return PerReplica.of(layout, _restore_idle(self.idle))


def describe_form(value: DistributedValues, layout: Global | Padded) -> GlobalForm | PaddedForm:
    """Returns the form of a value that is stored as `layout`."""
    idle = value.idle.find()
    if isinstance(layout, Padded):
        return PaddedForm(layout.mesh, layout.shapes, idle)
    wrapper = Mirrored if layout.mirrored else PerReplica
    return GlobalForm(wrapper, layout.mesh, layout.stacked, layout.mirrored, idle)


def _restore_idle(idle: frozenset[int]) -> IdleReplicas:
    return IdleReplicas(idle) if idle else NONE_IDLE

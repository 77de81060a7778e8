"""Replicas on several devices, with each variable on one device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from typing_extensions import override

from distribax.collectives import AllReduce
from distribax.strategies.mirrored import MirroredExtended
from distribax.strategies.strategy import Strategy
from distribax.topology import resolve_device, resolve_devices
from distribax.types import VariableSynchronization
from distribax.variables import Central, Placement, Stacked


class CentralStorageExtended(MirroredExtended):
    """Mirrored replicas whose variables are copied from one device at the start of a step."""

    def __init__(self, devices: Sequence[jax.Device], parameter_device: jax.Device) -> None:
        super().__init__(devices, AllReduce())
        self._parameters = (parameter_device,)

    @override
    def _placement(self, synchronization: VariableSynchronization, name: str) -> Placement:
        assert self.mesh is not None
        if synchronization is VariableSynchronization.ON_READ:
            return Stacked(self.mesh)
        return Central(self._parameters[0], self.mesh)

    @override
    def _copy_devices(self, count: int) -> tuple[jax.Device, ...]:
        return self._parameters if count == 1 else self._workers


class CentralStorageStrategy(Strategy):
    """Trains synchronously on several devices, with all variables on one device.

    Args:
        compute_devices: The devices that run replicas; chosen like `MirroredStrategy`'s.
        parameter_device: The device that holds the variables; the only compute device if there is
            one, else the host's CPU.

    Raises:
        ValueError: A device's name is not known, or two compute devices are the same.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        devices = resolve_devices(compute_devices)
        if parameter_device is not None:
            parameter = resolve_device(parameter_device)
        else:
            parameter = devices[0] if len(devices) == 1 else resolve_device("CPU:0")
        super().__init__(CentralStorageExtended(devices, parameter))

"""Towers on several devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distribax import strategies
from distribax.collectives import CrossDeviceOps
from distribax.contrib.distribute.strategy import DistributionStrategy
from distribax.data.distributed import InputOptions


class MirroredStrategy(DistributionStrategy):
    """One tower on each device, with a copy of every variable.

    Args:
        devices: Names or `jax.Device`s; by default all GPUs (or TPUs), else all CPU devices.
        num_gpus: How many GPUs to use, in place of `devices`.
        cross_tower_ops: The algorithm that combines values.
        prefetch_on_device: Whether batches are put on the devices ahead of use; True by default.

    Raises:
        ValueError: Both `devices` and `num_gpus` are given, or `num_gpus` is not a count.

    Example:
        >>> from distribax.contrib import distribute
        >>> distribute.MirroredStrategy(["CPU:0"]).num_towers
        1
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        num_gpus: int | None = None,
        cross_tower_ops: CrossDeviceOps | None = None,
        prefetch_on_device: bool | None = None,
    ) -> None:
        if num_gpus is not None:
            devices = _list_gpus(num_gpus, devices)
        super().__init__(strategies.MirroredStrategy(devices, cross_tower_ops))
        self._input_options = InputOptions(
            experimental_fetch_to_device=prefetch_on_device is not False
        )


def _list_gpus(num_gpus: int, devices: Sequence[str | jax.Device] | None) -> list[str | jax.Device]:
    if devices is not None:
        raise ValueError(
            f"MirroredStrategy: both devices={list(devices)!r} and num_gpus={num_gpus} are given. "
            "Pass one of them."
        )
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
        raise ValueError(
            f"MirroredStrategy: num_gpus={num_gpus!r} is not a count of GPUs. Expected an int of "
            "at least 1; on CPUs name devices, MirroredStrategy(['CPU:0', 'CPU:1'])."
        )
    return [f"GPU:{index}" for index in range(num_gpus)]

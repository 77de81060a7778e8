"""One tower on one device."""

from __future__ import annotations

import jax

from distribax import strategies
from distribax.contrib.distribute.strategy import DistributionStrategy


class OneDeviceStrategy(DistributionStrategy):
    """Runs everything on one device; useful to try code before it is distributed.

    Args:
        device: The device's name, for example "GPU:0", or a `jax.Device`.
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(strategies.OneDeviceStrategy(device))

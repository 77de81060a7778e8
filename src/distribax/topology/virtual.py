"""Virtual CPU devices: several JAX devices on the processor of one machine."""

from __future__ import annotations

import os
import re
from typing import Final

import jax

from distribax import jax_private
from distribax.topology import cpu_pool

_FLAG: Final = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_DEFAULT_POOL_DEVICES: Final = 2
"""For how many devices the pool is sized if nothing is configured yet.

A program may set jax_num_cpu_devices after the import. A pool for two devices costs nothing
measurable; a pool for many would slow down programs on one device.
"""


def count_cpu_devices() -> int:
    """Returns how many CPU devices JAX has, or will create when its backend starts."""
    if jax_private.have_backends_started():
        try:
            return len(jax.local_devices(backend="cpu"))
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU.
            return 0
    asked = jax_private.get_requested_cpu_devices()
    if asked is not None:
        return max(1, asked)
    counts = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return max(1, int(counts[-1])) if counts else 1


def set_virtual_cpu_devices(num_devices: int) -> None:
    """Creates at least `num_devices` CPU devices; call it before the first JAX computation.

    If an earlier call, jax_num_cpu_devices or XLA_FLAGS requests more devices, they are kept. After
    JAX has started, a call does nothing if there are enough devices. The call also sizes the thread
    pool of the devices, see `distribax.topology.cpu_pool`.

    Args:
        num_devices: How many devices are needed.

    Raises:
        RuntimeError: JAX has already started, with fewer devices.
        TypeError: `num_devices` is not an int.
        ValueError: `num_devices` is less than 1.

    >>> import distribax as dx
    >>> dx.set_virtual_cpu_devices(4)  # doctest: +SKIP
    >>> dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])  # doctest: +SKIP
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise TypeError(
            f"num_devices={num_devices!r} is a {type(num_devices).__name__}. Expected an int, for "
            "example set_virtual_cpu_devices(2)."
        )
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: expected a number of devices, 1 or more.")
    present = count_cpu_devices()
    if jax_private.have_backends_started():
        if num_devices > present:
            raise RuntimeError(
                f"num_devices={num_devices}: too late, JAX has already started with {present} CPU "
                f"device(s). Call set_virtual_cpu_devices({num_devices}) before the first JAX "
                "computation (at the top of the program, right after the imports), or start the "
                f"program with the environment variable JAX_NUM_CPU_DEVICES={num_devices}."
            )
        return
    if num_devices > present:
        jax.config.update("jax_num_cpu_devices", num_devices)
    cpu_pool.size_pool(max(num_devices, present))


def size_pool_on_import() -> None:
    """Sizes the thread pool for the devices that the environment or jax.config requests."""
    cpu_pool.size_pool_by_default(_DEFAULT_POOL_DEVICES)
    cpu_pool.size_pool(count_cpu_devices())

"""Virtual CPU devices: several JAX devices on one machine's processor."""

from __future__ import annotations

import os
import re
from typing import Final

import jax

from distribax import jax_private
from distribax.topology import cpu_pool

_FLAG: Final = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_DEVICES_WITHOUT_ASKING: Final = 2
"""Number of devices that the pool serves when nobody has asked for devices yet.

Someone may set jax_num_cpu_devices after the import. A pool for two costs nothing measurable; a
pool for many would slow down programs on one device.
"""


def configured_cpu_devices() -> int:
    """Returns how many CPU devices JAX has, or will make when its backend starts."""
    if jax_private.have_backends_started():
        try:
            return len(jax.local_devices(backend="cpu"))
        except RuntimeError:  # JAX_PLATFORMS leaves the CPU out.
            return 0
    asked = jax_private.get_requested_cpu_devices()
    if asked is not None:
        return max(1, asked)
    counts = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return max(1, int(counts[-1])) if counts else 1


def set_virtual_cpu_devices(num_devices: int) -> None:
    """Makes at least `num_devices` CPU devices; call it before the first JAX computation.

    >>> import distribax as dx
    >>> dx.set_virtual_cpu_devices(4)  # doctest: +SKIP
    >>> dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])  # doctest: +SKIP

    More devices, made by an earlier call, jax_num_cpu_devices or XLA_FLAGS, stay. Once JAX has
    started, asking for as many devices as there are, or fewer, does nothing; asking for more is a
    RuntimeError. The call also sizes the thread pool of the devices, see
    `distribax.topology.cpu_pool`.
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise TypeError(
            f"num_devices={num_devices!r} is a {type(num_devices).__name__}. Expected an int, for "
            "example set_virtual_cpu_devices(2)."
        )
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: expected a number of devices, 1 or more.")
    present = configured_cpu_devices()
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
    """Sizes the thread pool for the devices that the environment or jax.config asks for."""
    cpu_pool.size_pool_by_default(_DEVICES_WITHOUT_ASKING)
    cpu_pool.size_pool(configured_cpu_devices())

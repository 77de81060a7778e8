"""Virtual CPU devices: several JAX devices on the processor of one machine."""

from __future__ import annotations

import os
import re
from typing import Final

import jax

from distribax import jax_private
from distribax.topology import cpu_pool, restart

_FLAG: Final = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_DEFAULT_POOL_DEVICES: Final = 2
"""For how many devices the pool is sized if nothing is configured yet.

A program may set jax_num_cpu_devices after the import. A pool for two devices costs nothing
measurable; a pool for many would slow down programs on one device.
"""

_num_spare = 0
"""How many of the CPU devices nobody has asked for; they are the last ones."""


def count_cpu_devices() -> int:
    """Returns how many CPU devices JAX has, or will create when its backend starts."""
    if jax_private.have_backends_started():
        try:
            return len(jax.local_devices(backend="cpu"))
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU.
            return 0
    return max(1, _read_configured() or 1)


def _read_configured() -> int | None:
    """Returns how many CPU devices jax.config or XLA_FLAGS requests; None if neither does."""
    asked = jax_private.get_requested_cpu_devices()
    if asked is not None:
        return asked
    counts = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def count_used_cpu_devices() -> int:
    """Returns how many CPU devices somebody has asked for: all of them but the spare ones."""
    return count_cpu_devices() - _num_spare


def name_cpu_devices(num_devices: int) -> None:
    """Creates the first `num_devices` CPU devices, if that is still possible.

    People try one device first and several later, when it may be too late. So if JAX has not
    started, as many more are made as its pool of threads can serve anyway.

    Args:
        num_devices: How many devices the program has named.
    """
    global _num_spare
    present = count_cpu_devices()
    used = max(num_devices, present - _num_spare)
    started = jax_private.have_backends_started()
    if not started and _read_configured() is None:
        cpu_pool.size_pool(num_devices)
        _add_devices(max(num_devices, cpu_pool.count_served_devices()))
    elif num_devices > present and not (started and restart.explain_obstacle()):
        _add_devices(num_devices)
    # If it is too late for more, whoever looks for the device says what is in the way.
    _num_spare = max(0, count_cpu_devices() - used)


def set_virtual_cpu_devices(num_devices: int) -> None:
    """Creates at least `num_devices` CPU devices; call it before the first JAX computation.

    If an earlier call, jax_num_cpu_devices or XLA_FLAGS requests more devices, they are kept. After
    JAX has started, a call does nothing if there are enough devices; if there are not, JAX's CPU
    client is started again, which is possible as long as no array is alive. The call also sizes the
    thread pool of the devices, see `distribax.topology.cpu_pool`.

    Args:
        num_devices: How many devices are needed.

    Raises:
        RuntimeError: JAX has already started, with fewer devices, and they are in use.
        TypeError: `num_devices` is not an int.
        ValueError: `num_devices` is less than 1.

    >>> import distribax as dx
    >>> dx.set_virtual_cpu_devices(4)  # doctest: +SKIP
    >>> dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])  # doctest: +SKIP
    """
    global _num_spare
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise TypeError(
            f"num_devices={num_devices!r} is a {type(num_devices).__name__}. Expected an int, for "
            "example set_virtual_cpu_devices(2)."
        )
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: expected a number of devices, 1 or more.")
    present = count_cpu_devices()
    if num_devices > present and jax_private.have_backends_started():
        obstacle = restart.explain_obstacle() if present else "JAX_PLATFORMS excludes the CPU"
        if obstacle is not None:
            raise RuntimeError(
                f"num_devices={num_devices}: too late, JAX has already started with {present} CPU "
                f"device(s), and {obstacle}. Call set_virtual_cpu_devices({num_devices}) before "
                "the first JAX computation (at the top of the program, right after the imports), "
                "or start the program with the environment variable "
                f"JAX_NUM_CPU_DEVICES={num_devices}."
            )
    _add_devices(max(num_devices, present))
    _num_spare = 0


def _add_devices(num_devices: int) -> None:
    if not jax_private.have_backends_started():
        _request(num_devices)
    elif num_devices > count_cpu_devices():
        restart.replace_client(lambda: _request(num_devices))


def _request(num_devices: int) -> None:
    """Sets what JAX reads when it starts."""
    if num_devices > count_cpu_devices():
        jax.config.update("jax_num_cpu_devices", num_devices)
    cpu_pool.size_pool(num_devices)


def size_pool_on_import() -> None:
    """Sizes the thread pool for the devices that the environment or jax.config requests."""
    cpu_pool.size_pool_by_default(_DEFAULT_POOL_DEVICES)
    cpu_pool.size_pool(count_cpu_devices())

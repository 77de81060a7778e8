"""The thread pool that the CPU devices of a process share, large enough to never deadlock.

XLA starts and runs the programs of all CPU devices on one pool of threads. Starting a program on n
devices takes n threads, which wait if about 32 programs are already queued on a device. Running a
program on n devices takes n more threads, and those that reach a collective wait for the last one.
So 2n - 1 threads can all be waiting while the program that they wait for gets no thread: a
deadlock. With 2n threads it is impossible, as long as only one Python thread at a time starts
programs on several devices, which `launch_lock` ensures. Measured on two cores: with 2n - 1
threads, a training step on 2, 4, 8 and 16 devices deadlocks within a few hundred calls; with 2n
threads it never did. Two threads that start programs without the lock need 3n.

XLA creates max(number of devices, X) threads when its CPU client starts. X is the environment
variable PJRT_NPROC, or else NPROC, or else the number of cores.

The rule here: for n > 1 devices PJRT_NPROC becomes 2n, unless the pool is at least that large
anyway. NPROC, which other programs read, too, is never changed.

- The rule is applied on import, whenever virtual devices are requested, and before distribax itself
  starts the backend. It never makes the pool smaller.
- A size that the user has set is only raised if it could deadlock. On one device any size is
  respected, even 1.
- More threads than needed slow down matrix products (on two cores, a step on 2 devices took
  14 % longer with 8 threads than with 4), so the pool is no larger than it must be.
- PJRT_NPROC is restored when distribax first notices that the backend has started. Child processes
  that were started before inherit it. That is harmless, but a launcher that wants small pools in
  its children sets PJRT_NPROC for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import jax

from distribax import jax_private

launch_lock: Final = threading.RLock()
"""Held while a compiled program is started on several CPU devices: one thread at a time does so.

Programs overwrite the memory of the variables that they write, so it is also held from the moment
that a variable's memory is taken until the new value is stored, and wherever else the memory of a
variable is looked up. Neither user code nor a wait for another process may run under it.
"""

_POOL_VARIABLE: Final = "PJRT_NPROC"
_FALLBACK_VARIABLE: Final = "NPROC"


@dataclass(frozen=True)
class _Setting:
    """A value that this module gave PJRT_NPROC, and the one it replaced."""

    value: str
    replaced: str | None


_setting: _Setting | None = None
"""The setting that is in force."""


def find_safe_pool_size(num_devices: int) -> int:
    """Returns the smallest number of threads with which that many CPU devices never deadlock."""
    return 1 if num_devices <= 1 else 2 * num_devices


def _read_pool_size() -> int | None:
    """Returns the pool size in the environment, read as XLA reads it; None if there is none."""
    for variable in (_POOL_VARIABLE, _FALLBACK_VARIABLE):
        try:
            return max(0, int(os.environ[variable]))
        except (KeyError, ValueError):
            continue
    return None


def count_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _predict_pool_size(num_devices: int) -> int:
    """Returns the size of the pool if XLA creates that many devices in this environment."""
    size = _read_pool_size()
    return max(num_devices, count_cores() if size is None else size)


def count_served_devices() -> int:
    """Returns how many devices can be used together with the pool that XLA will create anyway."""
    return max(1, _predict_pool_size(1) // 2)


def size_pool(num_devices: int) -> None:
    """Requests a pool that is large enough for the devices, if the backend has not started."""
    global _setting
    size = find_safe_pool_size(num_devices)
    if jax_private.have_backends_started() or _predict_pool_size(num_devices) >= size:
        return
    current = os.environ.get(_POOL_VARIABLE)
    replaced = current if _setting is None else _setting.replaced
    _setting = _Setting(str(size), replaced)
    os.environ[_POOL_VARIABLE] = str(size)


def size_pool_by_default(num_devices: int) -> None:
    """Does the same as `size_pool`, unless the environment has a size of its own."""
    if _read_pool_size() is None:
        size_pool(num_devices)


def restore_environment() -> None:
    """Restores PJRT_NPROC after the backend has read it."""
    global _setting
    if _setting is None or not jax_private.have_backends_started():
        return
    setting, _setting = _setting, None
    if os.environ.get(_POOL_VARIABLE) != setting.value:
        return  # The user has changed it since.
    if setting.replaced is None:
        del os.environ[_POOL_VARIABLE]
    else:
        os.environ[_POOL_VARIABLE] = setting.replaced


def check_cpu_pool(devices: Sequence[jax.Device]) -> None:
    """Raises an error if programs on these devices could deadlock.

    That is only possible if the backend was started before distribax was imported, or with more
    devices than distribax knew of. Devices of other platforms and of other processes do not share
    the pool and are not counted.

    Raises:
        RuntimeError: The pool is too small.
    """
    here = jax_private.get_process_id()
    num_devices = sum(d.platform == "cpu" and d.process_index == here for d in devices)
    # If threads cannot be counted, the environment is the best guess; it must be read before it is
    # restored.
    threads = jax_private.count_cpu_pool_threads() or _predict_pool_size(num_devices)
    restore_environment()
    needed = find_safe_pool_size(num_devices)
    if num_devices > 1 and threads < needed:
        raise RuntimeError(
            f"A step on {num_devices} CPU devices could deadlock: JAX has started with {threads} "
            f"threads for them, and {needed} are needed. The number is fixed when JAX creates its "
            "devices. Import distribax before the first JAX computation and call "
            f"distribax.set_virtual_cpu_devices({num_devices}) right after, or start the program "
            f"with the environment variable {_POOL_VARIABLE}={needed}."
        )

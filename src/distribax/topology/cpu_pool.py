"""The thread pool that a process' CPU devices share, made large enough to never dead-lock.

XLA starts and runs the programs of all CPU devices on one pool of threads. To start a program on n
devices takes n of them, and when some 32 programs are under way on a device, the n wait there for a
place. A program that runs on n devices takes n more, and those that have come to a collective wait
for the last one. So 2n - 1 threads can all be waiting while the program that everyone waits for
finds no thread: a dead-lock. With 2n threads it is impossible, as long as one Python thread at a
time starts programs on several devices; `launch_lock` sees to that. Measured on two cores: with
2n - 1 threads a training step on 2, 4, 8 and 16 devices dead-locks within some hundred calls, with
2n threads it never did; two threads that start programs without the lock need 3n.

XLA makes max(number of devices, X) threads when its CPU client starts, where X is the first of
these that is set: the environment variables PJRT_NPROC and NPROC, the number of cores.

The rule here: for n > 1 devices PJRT_NPROC becomes 2n, unless the pool is at least that large
anyway. NPROC, which other programs read too, is never touched.

- The rule is applied on import, whenever virtual devices are asked for, and before distribax itself
  starts the backend. It only ever makes the pool larger.
- A size that the user has set is raised only when it would dead-lock. On one device any size is
  respected, also 1.
- More threads than needed slow down matrix products (on two cores, a step on 2 devices took
  14 % longer with 8 threads than with 4), so the pool is as large as it must be, and no larger.
- PJRT_NPROC is taken back when distribax first sees that the backend has started. Child processes
  started after that do not inherit it, and those started before do: harmless, but a launcher that
  wants small children sets PJRT_NPROC for them.
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
"""Held while a compiled program is started on several CPU devices, so that one thread does it at a
time. It is for the call of the compiled program only: no user code may run under it."""

_POOL_VARIABLE: Final = "PJRT_NPROC"
_FALLBACK_VARIABLE: Final = "NPROC"


@dataclass(frozen=True)
class _Setting:
    """A value that this module gave PJRT_NPROC, and the one it replaced."""

    value: str
    replaced: str | None


_settings: list[_Setting] = []
"""The setting that is in force: none or one."""


def safe_pool_size(num_devices: int) -> int:
    """Returns the smallest number of threads with which that many CPU devices never dead-lock."""
    return 1 if num_devices <= 1 else 2 * num_devices


def _wish() -> int | None:
    """Returns the pool size the environment asks for, read as XLA reads it; None for no wish."""
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


def _planned_size(num_devices: int) -> int:
    """Returns the size XLA gives the pool if it makes that many devices in this environment."""
    wish = _wish()
    return max(num_devices, count_cores() if wish is None else wish)


def size_pool(num_devices: int) -> None:
    """Asks for a pool that is large enough for the devices, if the backend has not started."""
    size = safe_pool_size(num_devices)
    if jax_private.have_backends_started() or _planned_size(num_devices) >= size:
        return
    current = os.environ.get(_POOL_VARIABLE)
    replaced = _settings.pop().replaced if _settings else current
    _settings.append(_Setting(str(size), replaced))
    os.environ[_POOL_VARIABLE] = str(size)


def size_pool_by_default(num_devices: int) -> None:
    """Like `size_pool`, but gives way to any size that the environment asks for."""
    if _wish() is None:
        size_pool(num_devices)


def restore_environment() -> None:
    """Takes PJRT_NPROC back to what it was, once the backend has read it."""
    if not _settings or not jax_private.have_backends_started():
        return
    setting = _settings.pop()
    if os.environ.get(_POOL_VARIABLE) != setting.value:
        return  # Somebody has changed it since; then it is theirs.
    if setting.replaced is None:
        del os.environ[_POOL_VARIABLE]
    else:
        os.environ[_POOL_VARIABLE] = setting.replaced


def check_cpu_pool(devices: Sequence[jax.Device]) -> None:
    """Raises a RuntimeError if programs on these devices could dead-lock.

    That happens only when the backend was started before distribax was imported, or with more
    devices than distribax knew of. Devices of other platforms and of other processes do not share
    the pool and are not counted.
    """
    here = jax_private.get_process_id()
    num_devices = sum(d.platform == "cpu" and d.process_index == here for d in devices)
    # Where threads cannot be counted, the environment is the best there is; read before it is
    # taken back.
    threads = jax_private.count_cpu_pool_threads() or _planned_size(num_devices)
    restore_environment()
    needed = safe_pool_size(num_devices)
    if num_devices > 1 and threads < needed:
        raise RuntimeError(
            f"A step on {num_devices} CPU devices could dead-lock: JAX has started with {threads} "
            f"threads for them, and {needed} are needed. The number is fixed when JAX makes its "
            "devices. Import distribax before the first JAX computation and call "
            f"distribax.set_virtual_cpu_devices({num_devices}) right after, or start the program "
            f"with the environment variable {_POOL_VARIABLE}={needed}."
        )

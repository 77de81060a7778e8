"""The backend: device clients and their threads, and settings of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.extend
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jaxlib import _jax


def have_backends_started() -> bool:
    """Tells whether JAX has created its device clients, after which device counts are fixed."""
    return _xla_bridge.backends_are_initialized()


def get_started_platforms() -> set[str]:
    """Returns the platforms whose device clients JAX has created; it creates none."""
    return set(_xla_bridge.backends()) if have_backends_started() else set()


def is_connected() -> bool:
    """Tells whether `jax.distributed` has connected this process with others."""
    return _distributed.global_state.client is not None


def end_backends() -> None:
    """Ends JAX's device clients and forgets compiled programs; the next use starts them again."""
    jax.extend.backend.clear_backends()


def set_collectives_host(host: str) -> None:
    """Has the CPU client listen for other processes at this address, and tell it to them.

    By default it takes what the machine's own name means, which may be a loopback address.
    """

    def make_client() -> object:
        client = _distributed.global_state.client
        if client is None or _config.cpu_collectives_implementation.value != "gloo":
            return _xla_bridge.make_cpu_client()
        return _xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=host))

    _xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def get_process_id() -> int:
    """Returns this process's index in `jax.distributed`, without starting a backend."""
    return _distributed.global_state.process_id


def get_requested_cpu_devices() -> int | None:
    """Returns the value of jax_num_cpu_devices; None when it is not set."""
    asked: int = _xla_bridge.num_cpu_devices.value
    return asked if asked >= 0 else None


def get_default_device() -> jax.Device | str | None:
    """Returns the device (or platform name) that `jax.default_device` has set, or None."""
    device: jax.Device | str | None = _config.default_device.value
    return device


def has_64_bits() -> bool:
    """Tells whether JAX computes with 64 bits where it is asked to."""
    return bool(_config.enable_x64.value)


def count_cpu_pool_threads() -> int | None:
    """Returns how many threads XLA's CPU client has for its programs; None when that is unknown.

    XLA does not report it, but names the threads of its compute pool, and Linux shows their names.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    count = 0
    for comm in tasks.glob("*/comm"):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError):
            count += comm.read_text().startswith("tf_XLAEigen")
    return count or None


def copy_thread_settings() -> Callable[[], None]:
    """Returns a function that gives another thread the settings that this one has now.

    Our threads that run user code take them over, so that it does not matter which thread runs it.
    """
    local = [
        (state, value)
        for state in _config.config_states.values()
        if (value := state.get_local()) is not _config.config_ext.unset
    ]

    def apply() -> None:
        for state, value in local:
            state.set_local(value)
            if state._update_thread_local_hook is not None:
                state._update_thread_local_hook(value)

    return apply

"""Names of JAX that are not stable, of those that connect processes: see `jax_private`."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
from jax._src import array as _array
from jax._src import distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import _jax, xla_client  # type: ignore[attr-defined]

_distributed: Any = distributed
_arrays: Any = _array.ArrayImpl
_clients: Any = xla_client
# Years, in seconds.
_NEVER = 10**8
_MAX_AHEAD = 16
_SMALL_BYTES = 1 << 12
_started: deque[Any] = deque()
_is_patient = False


def wait_with(patient: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Lets all waits for the values of arrays, the user's too, go through `patient`.

    It is called with a function that waits, and what for.
    """
    global _is_patient
    _is_patient = True
    read, wait = _arrays._value.fget, _arrays.block_until_ready
    wait_all = _clients.batched_block_until_ready

    def value(array: Any) -> Any:
        if array._npy_value is None and not array.is_ready():
            patient(wait, array)
        return patient(read, array)

    _arrays._value = property(value)
    _arrays.block_until_ready = lambda array: patient(wait, array)
    _clients.batched_block_until_ready = lambda arrays: patient(wait_all, arrays)


def pace(results: list[Any]) -> None:
    """Waits for older programs, now that one has been started which gives these results.

    JAX starts programs ahead of time, up to 32, and then waits where nothing can call it back. So
    that wait is here. A program is known by a small result, which costs nothing to keep.
    """
    if not _is_patient:
        return
    small = next((each for each in results if each.nbytes <= _SMALL_BYTES), None)
    if small is not None:
        _started.append(small)
    if len(_started) > _MAX_AHEAD:
        oldest = _started.popleft()
        if not oldest.is_deleted() and not oldest.is_ready():
            oldest.block_until_ready()


class _PatientClients:
    """JAX's makers of coordination clients, but these do not wait for each other at the end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_jax, name)

    def get_distributed_runtime_client(self, *args: Any, **kwargs: Any) -> Any:
        return _jax.get_distributed_runtime_client(*args, **kwargs, shutdown_on_destruction=False)


def connect_processes(address: str, num_processes: int, process_id: int) -> None:
    """Connects the processes of `jax.distributed`; none is ended when another one is lost.

    XLA would end it from a thread of its own. A callback could be given instead, but cannot be a
    Python function (std::bad_cast). So its checks are off, and somebody else must watch.
    """
    _distributed._jax = _PatientClients()
    try:
        jax.distributed.initialize(
            address,
            num_processes=num_processes,
            process_id=process_id,
            initialization_timeout=_NEVER,
            heartbeat_timeout_seconds=_NEVER,
            coordinator_bind_address=address,
        )
    finally:
        _distributed._jax = _jax


def cancel_coordination() -> None:
    """Makes all calls fail that wait for the coordination service; it tells nobody."""
    client = _distributed.global_state.client
    if client is not None:
        client.shutdown()


def forget_processes() -> None:
    """Leaves JAX's devices and connections as they are at the end: ending them could wait."""
    state = _distributed.global_state
    parts = (state.preemption_sync_manager, state.client, state.service)
    for part in (*parts, *_xla_bridge._backends.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.preemption_sync_manager = state.client = state.service = None

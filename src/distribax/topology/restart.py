"""Starting JAX's CPU client again, to have more devices while nothing uses those there are.

The number of CPU devices is fixed when JAX starts. A program that tries a strategy with one device
and then one with several would be too late. As long as no array is alive, the client can be
replaced; what holds its devices, such as a strategy, is given those of the new client.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Protocol, TypeAlias

import jax

from distribax import jax_private
from distribax.topology.cpu_pool import launch_lock

Renew: TypeAlias = Callable[[jax.Device], jax.Device]
"""Returns the device of the new client that replaces one of the old client."""


class DeviceHolder(Protocol):
    """Something that holds devices for a long time."""

    def renew_devices(self, renew: Renew) -> None:
        """Replaces the devices by those of a new client."""


_holders: weakref.WeakSet[DeviceHolder] = weakref.WeakSet()


def follow(holder: DeviceHolder) -> None:
    """Lets `holder` know when devices are replaced, as long as it is alive."""
    _holders.add(holder)


def explain_obstacle() -> str | None:
    """Returns why JAX's CPU client cannot be started again, or None if it can."""
    if jax_private.get_started_platforms() != {"cpu"}:
        return "JAX uses other devices too"
    if jax_private.is_connected():
        return "this process is connected with others"
    if jax_private.is_tracing():
        return "a JAX transformation is running"
    # What only caches hold is not in use: compiled steps keep the variables that they change.
    jax.clear_caches()
    gc.collect()
    alive = jax.live_arrays()
    if alive:
        examples = ", ".join(f"{a.dtype}{list(a.shape)}" for a in alive[:3])
        return f"{len(alive)} array(s) are alive ({examples}{', ...' if len(alive) > 3 else ''})"
    return None


def replace_client(prepare: Callable[[], None]) -> None:
    """Ends JAX's CPU client, calls `prepare`, starts a new one, and renews all devices.

    Args:
        prepare: Changes the settings that JAX reads when it starts.
    """
    with launch_lock:
        old = jax.local_devices(backend="cpu")
        jax_private.end_backends()
        prepare()
        new = jax.local_devices(backend="cpu")
    replaced = {id(device): new[index] for index, device in enumerate(old)}
    for holder in tuple(_holders):
        holder.renew_devices(lambda device: replaced.get(id(device), device))
    del old
    gc.collect()  # The threads of the old client end with it.

"""Settings of JAX that hold for one thread, as `with jax.enable_x64(True):` makes them."""

from __future__ import annotations

from collections.abc import Callable

from jax._src import config as _config

_UNSET = _config.config_ext.unset


def copy_thread_settings() -> Callable[[], None]:
    """Returns a function that gives another thread the settings that this one has now.

    A thread of our own that runs code of the user's has them, so that it does not matter which
    thread runs it.
    """
    local = [
        (state, value)
        for state in _config.config_states.values()
        if (value := state.get_local()) is not _UNSET
    ]

    def apply() -> None:
        for state, value in local:
            state.set_local(value)
            if state._update_thread_local_hook is not None:
                state._update_thread_local_hook(value)

    return apply

"""Copies values of any locality to one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distribax import jax_private
from distribax.execution import frames
from distribax.values import Mirrored, PerReplica, is_wrapped
from distribax.variables import Variable


def fetch(value: object, device: jax.Device, fn: Callable[[Any], Any] | None) -> Any:
    """Returns `value`, or `fn(value)` computed where the value is, on `device`."""
    if isinstance(value, Variable):
        value = value.read_value() if value.per_replica else value.distributed()
    if is_wrapped(value) and not isinstance(value, Mirrored):
        return PerReplica([_fetch_one(piece, device, fn) for piece in value.values])
    if isinstance(value, Mirrored):
        value = value.get() if frames.current() is not None else _find_nearest(value, device)
    return _fetch_one(value, device, fn)


def _find_nearest(value: Mirrored, device: jax.Device) -> Any:
    """Returns the copy that is on `device`, or else the first one."""
    for piece in value.values:
        if isinstance(piece, jax.Array) and piece.devices() == {device}:
            return piece
    return value.values[0]


def _fetch_one(value: Any, device: jax.Device, fn: Callable[[Any], Any] | None) -> Any:
    if fn is not None:
        with jax.default_device(_find_device(value)):
            value = fn(value)
    array = jnp.asarray(value)
    if jax_private.is_tracer(array):
        return array
    return jax_private.uncommit(jax_private.move_to_device(array, device))


def _find_device(value: object) -> Any:
    """Returns the device to compute on: that of the value, if it is on one."""
    if isinstance(value, jax.Array) and not jax_private.is_tracer(value):
        devices = value.devices()
        if len(devices) == 1:
            return next(iter(devices))
    return jax_private.get_default_device()

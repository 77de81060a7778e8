"""`dx.visualize`: which device has which part of a value, as text."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding

from distribax.topology import device_name
from distribax.values import is_wrapped
from distribax.variables import ShardedVariable, Variable


def visualize(value: object) -> str:
    """Returns text that shows which device has which part of a value.

    `jax.debug.visualize_array_sharding` draws arrays of one or two dimensions. This takes any
    number of dimensions, and also variables and values of replicas.

    Args:
        value: An array, a variable, or a value of replicas such as `strategy.run` returns.

    Returns:
        A line for each part that this process has: its device, and which part it is.

    Raises:
        TypeError: The value is none of these.

    Example:
        >>> import distribax as dx
        >>> print(dx.visualize(dx.Variable([[1.0, 2.0]])))
        Variable, float32 (1, 2)
          CPU:0  all
    """
    if isinstance(value, ShardedVariable):
        lines = [f"ShardedVariable, {np.dtype(value.dtype)} {value.shape}"]
        for index, shard in enumerate(value.variables):
            lines += [f"  shard {index}, {shard.shape}: {', '.join(_list_homes(shard))}"]
        return "\n".join(lines)
    if isinstance(value, Variable):
        title = f"{value.placement.label}, {np.dtype(value.dtype)} {value.shape}"
        homes = _list_homes(value)
        if value.per_replica:
            lines = [f"  {home}  value of its replica" for home in homes]
        elif value.placement.sharding is None or value.placement.specs:
            lines = [f"  {home}  all" for home in homes]
        else:
            lines = _list_parts(value.placement.sharding, value.shape)
        return "\n".join([title, *lines])
    if is_wrapped(value):
        lines = [f"{type(value).__name__}, {len(value.values)} values here"]
        for index, each in enumerate(value.values):
            shape = getattr(each, "shape", None)
            home = _shorten(each.device) if isinstance(each, jax.Array) else "host"
            lines.append(f"  {home}  value {index}" + ("" if shape is None else f", {shape}"))
        return "\n".join(lines)
    if isinstance(value, jax.Array):
        title = f"Array, {value.dtype} {value.shape}"
        return "\n".join([title, *_list_parts(value.sharding, value.shape)])
    raise TypeError(
        f"visualize: {type(value).__name__} has no devices. Expected a JAX array, a dx.Variable, "
        "or a value of replicas; for a nest, visualize its leaves."
    )


def _list_parts(sharding: Sharding, shape: tuple[int, ...]) -> list[str]:
    is_whole = sharding.shard_shape(shape) == shape
    lines: list[str] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ranges = [
            f"{part.start or 0}:{size if part.stop is None else part.stop}"
            for part, size in zip(index or (), shape, strict=True)
        ]
        part = "all" if is_whole else f"[{', '.join(ranges)}]"
        lines.append(f"  {_shorten(device)}  {part}")
    return lines


def _list_homes(variable: Variable) -> list[str]:
    if variable.placement.specs:
        return [f"server {spec.server}" for spec in variable.placement.specs]
    return [_shorten(device) for device in variable.devices]


def _shorten(device: jax.Device) -> str:
    return device_name(device).rpartition("device:")[2]

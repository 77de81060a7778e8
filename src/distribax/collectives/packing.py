"""Joining small tensors into large ones before a reduction, and splitting the result again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribax.topology import has_cpus_of_several_processes


@dataclass(frozen=True)
class PackLimits:
    """Up to which size, in bytes, a tensor is worth a copy into a pack, and a pack may grow to.

    A pack of 0 bytes is not limited.
    """

    tensor: int
    pack: int = 0


# Measured (docs/benchmarks.md): a tensor of up to 4 KiB costs less to copy into a pack than to
# reduce alone, on 2 to 8 devices; a larger one may not.
_WITHIN_PROCESS = PackLimits(4 << 10)

# Between processes each reduction costs the wait for messages as well; but messages of more than a
# few megabytes do not fit into the buffers of a connection, and are slow.
_BETWEEN_PROCESSES = PackLimits(2 << 20, 4 << 20)


def choose_pack_limits(mesh: Mesh) -> PackLimits:
    """Returns the limits that are best on these devices."""
    return _BETWEEN_PROCESSES if has_cpus_of_several_processes(mesh) else _WITHIN_PROCESS


def reduce_packed(
    values: list[jax.Array],
    reduce_all: Callable[[list[jax.Array]], list[jax.Array]],
    limits: PackLimits,
) -> list[jax.Array]:
    """Reduces `values` with the small ones joined into packs, by data type."""
    packs = _choose_packs(values, limits)
    joined = [
        values[members[0]]
        if len(members) == 1
        else jnp.concatenate([jnp.ravel(values[index]) for index in members])
        for members in packs
    ]
    results: dict[int, jax.Array] = {}
    for members, reduced in zip(packs, reduce_all(joined), strict=True):
        if len(members) == 1:
            results[members[0]] = reduced
            continue
        start = 0
        for index in members:
            size, shape = jnp.size(values[index]), jnp.shape(values[index])
            results[index] = reduced[start : start + size].reshape(shape)
            start += size
    return [results[index] for index in range(len(values))]


def _choose_packs(values: list[jax.Array], limits: PackLimits) -> list[list[int]]:
    """Returns which values are reduced together, as lists of their indices."""
    packs: list[list[int]] = []
    filling: dict[np.dtype, tuple[list[int], int]] = {}
    for index, value in enumerate(values):
        dtype = jnp.result_type(value)
        size = jnp.size(value) * dtype.itemsize
        if size > limits.tensor:
            packs.append([index])
            continue
        members, filled = filling.get(dtype, ([], 0))
        if not members or (limits.pack and filled + size > limits.pack):
            members, filled = [], 0
            packs.append(members)
        members.append(index)
        filling[dtype] = (members, filled + size)
    return packs

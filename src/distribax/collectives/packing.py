"""Joining small tensors into large ones before a reduction, and taking them apart again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from distribax.topology import has_cpus_of_several_processes

# Measured (docs/benchmarks.md): a tensor of up to 4 KiB costs less to copy into a pack than to
# reduce alone, on 2 to 8 devices; a larger one may not.
_SMALL_BYTES = 4 * 1024

# Between processes each reduction costs the wait for messages as well.
_SMALL_BYTES_BETWEEN_PROCESSES = 64 * 1024


def small_bytes(mesh: Mesh) -> int:
    """Returns up to which size a tensor is worth a copy into a pack on these devices."""
    if has_cpus_of_several_processes(mesh):
        return _SMALL_BYTES_BETWEEN_PROCESSES
    return _SMALL_BYTES


def reduce_packed(
    values: list[Any],
    reduce_all: Callable[[list[Any]], list[Any]],
    bytes_per_pack: int,
    small_bytes: int,
) -> list[Any]:
    """Reduces `values` with those of up to `small_bytes` joined into packs, by data type.

    `bytes_per_pack` limits the size of a pack; 0 sets no limit.
    """
    packs = _packs(values, bytes_per_pack, small_bytes)
    joined = [
        values[members[0]]
        if len(members) == 1
        else jnp.concatenate([jnp.ravel(values[index]) for index in members])
        for members in packs
    ]
    results: list[Any] = [None] * len(values)
    for members, reduced in zip(packs, reduce_all(joined), strict=True):
        if len(members) == 1:
            results[members[0]] = reduced
            continue
        start = 0
        for index in members:
            size, shape = jnp.size(values[index]), jnp.shape(values[index])
            results[index] = reduced[start : start + size].reshape(shape)
            start += size
    return results


def _packs(values: list[Any], bytes_per_pack: int, small_bytes: int) -> list[list[int]]:
    """Returns which values are reduced together, as lists of their indices."""
    packs: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, value in enumerate(values):
        dtype = jnp.result_type(value)
        size = jnp.size(value) * dtype.itemsize
        if size > small_bytes:
            packs.append([index])
            continue
        members, filled = filling.get(dtype, ([], 0))
        if not members or (bytes_per_pack and filled + size > bytes_per_pack):
            members, filled = [], 0
            packs.append(members)
        members.append(index)
        filling[dtype] = (members, filled + size)
    return packs

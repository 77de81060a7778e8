"""Joining many small tensors into few large ones before a reduction, and taking them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp


def reduce_packed(
    values: list[Any], reduce_flat: Callable[[Any], Any], bytes_per_pack: int
) -> list[Any]:
    """Reduces `values` in packs of one data type and about `bytes_per_pack` bytes each.

    A value as large as a pack is reduced alone, as copying it would cost more than it saves.
    """
    results: list[Any] = [None] * len(values)
    for members in _packs(values, bytes_per_pack):
        if len(members) == 1:
            results[members[0]] = reduce_flat(values[members[0]])
            continue
        pack = jnp.concatenate([jnp.ravel(values[index]) for index in members])
        reduced = reduce_flat(pack)
        start = 0
        for index in members:
            size, shape = jnp.size(values[index]), jnp.shape(values[index])
            results[index] = reduced[start : start + size].reshape(shape)
            start += size
    return results


def _packs(values: list[Any], bytes_per_pack: int) -> list[list[int]]:
    packs: list[list[int]] = []
    open_pack: dict[Any, tuple[list[int], int]] = {}
    for index, value in enumerate(values):
        dtype = jnp.result_type(value)
        size = jnp.size(value) * dtype.itemsize
        if size >= bytes_per_pack:
            packs.append([index])
            continue
        members, filled = open_pack.get(dtype, ([], 0))
        if not members or filled + size > bytes_per_pack:
            members, filled = [], 0
            packs.append(members)
        members.append(index)
        open_pack[dtype] = (members, filled + size)
    return packs

"""How elements become batches, and batches the parts of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distribax.data import elements
from distribax.data.elements import Element
from distribax.data.plan.padding import PadTo
from distribax.data.plan.pieces import SplitBatch, WorkerPart, WorkerShare
from distribax.data.plan.transforms import PaddedBatching


def pad_and_stack(node: PaddedBatching, rows: Sequence[Element]) -> Element:
    """Returns a batch of elements of different shapes."""
    first = rows[0]
    shapes, values = node.padded_shapes, node.padding_values
    if shapes is None:
        shapes = elements.map_leaves(lambda leaf: PadTo((None,) * np.ndim(leaf)), first)
    else:
        _check_structure(shapes, first, "padded_shapes")
    if isinstance(values, (tuple, dict)):
        _check_structure(values, first, "padding_values")
    else:
        # One value stands for all components.
        values = elements.map_leaves(lambda leaf: node.padding_values, first)
    return elements.map_leaves(
        lambda shape, value, *leaves: _pad_leaves(leaves, shape, value), shapes, values, *rows
    )


def _pad_leaves(leaves: Sequence[Any], pad_to: PadTo, value: object) -> np.ndarray[Any, Any]:
    dtype = elements.get_dtype(leaves[0])
    target = pad_to.target([np.shape(leaf) for leaf in leaves])
    result = np.full((len(leaves), *target), _parse_padding(value, dtype), dtype)
    for row, leaf in zip(result, leaves, strict=True):
        if target:
            row[tuple(slice(size) for size in np.shape(leaf))] = leaf
    if not target:
        return elements.stack_leaves(leaves)
    return result


def _check_structure(nest: object, element: Element, name: str) -> None:
    try:
        same = elements.map_leaves(
            lambda _, leaf: not isinstance(leaf, (tuple, dict)), nest, element
        )
    except ValueError:
        same = False
    if not all(elements.list_leaves(same)):
        raise ValueError(
            f"{name}={elements.shorten(nest)} has another structure than the elements, which are "
            f"{elements.describe(element)}."
        )


def _parse_padding(value: object, dtype: np.dtype[Any]) -> Any:
    """Returns what fills up a component of this dtype."""
    if value is None:
        return b"" if dtype.hasobject else np.zeros((), dtype)[()]
    if dtype.hasobject and isinstance(value, (str, bytes)):
        return value.encode() if isinstance(value, str) else value
    given = np.asarray(value)
    if not given.ndim and {given.dtype.kind, dtype.kind} <= set("biufc"):
        with np.errstate(invalid="ignore", over="ignore"):
            converted = given.astype(dtype)
        narrowed = given.dtype.kind == dtype.kind and dtype.kind in "fc"
        if narrowed or converted == given:
            return converted[()]
    raise TypeError(
        f"padding_values has {value!r} for a component of dtype {dtype}, which cannot hold it. "
        "Expected a single value of that dtype, or None for zeros (and empty text)."
    )


def cut_aligned(node: WorkerPart, batch: Element) -> Element:
    """Returns the rows or pieces of a global batch that belong to one worker."""
    share = node.share
    if share.num_pieces == 1:
        # All of it, which need not be a batch.
        return SplitBatch(batch, (batch,)) if node.split else batch
    size = elements.count_rows(batch)
    part = elements.take_rows(batch, *share.find_rows(size))
    return share.split(part, size) if node.split else part


def cut_in_turn(node: WorkerPart, batch: Element) -> list[Element]:
    """Returns a batch as the successive smaller batches of one worker."""
    size = elements.count_rows(batch)
    step = node.find_turn_size(size)
    parts = [elements.take_rows(batch, start, start + step) for start in range(0, size, step)]
    if not node.split:
        return parts
    alone = WorkerShare(1, 0, node.share.replicas_per_worker)
    return [alone.split(part, elements.count_rows(part)) for part in parts]

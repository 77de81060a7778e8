"""Elements as bytes and back: structure and shapes as JSON, arrays as they are; no pickles."""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

from distribax.data import elements
from distribax.data.element_spec import Spec, TensorSpec

_LENGTH = struct.Struct("<Q")
_SHORT = 4096
_load_short = functools.lru_cache(64)(json.loads)
MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
    struct.error,
)
"""What reading a file that somebody else has written may raise."""
_classes: dict[tuple[str, tuple[str, ...]], Callable[..., Any]] = {}
"""The named tuples of this program, by name and fields."""


def encode(element: elements.Element) -> bytes:
    """Returns an element as bytes."""
    leaves = elements.list_leaves(element)
    described, parts = [], []
    for leaf in leaves:
        entry, payload = _encode_leaf(leaf)
        described.append(entry)
        parts.append(payload)
    header = json.dumps({"structure": _save_structure(element), "leaves": described}).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *parts])


def decode(record: bytes) -> elements.Element:
    """Returns the element that `encode` has turned into bytes.

    Raises:
        ValueError: `encode` has not written this.
    """
    try:
        start = _LENGTH.size + _LENGTH.unpack_from(record)[0]
        text = record[_LENGTH.size : start]
        # The elements of a data set are mostly alike, and so are their headers.
        header = _load_short(text) if len(text) <= _SHORT else json.loads(text)
        leaves = []
        for entry in header["leaves"]:
            leaf, start = _decode_leaf(entry, record, start)
            leaves.append(leaf)
        left = iter(leaves)
        element = _load_structure(header["structure"], lambda: next(left, None))
    except MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if start > len(record) or len(elements.list_leaves(element)) != len(leaves):
        raise ValueError("its length does not fit its header")
    return element


def _encode_leaf(leaf: Any) -> tuple[dict[str, Any], bytes]:
    if isinstance(leaf, elements.DatasetLeaf):
        raise TypeError("an element that holds a data set cannot be saved; flatten it first.")
    if isinstance(leaf, bytes):
        return {"bytes": len(leaf)}, leaf
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        items = array.ravel().tolist()
        return {"shape": array.shape, "texts": [len(item) for item in items]}, b"".join(items)
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    entry: dict[str, Any] = {"shape": array.shape, "dtype": dtype.name}
    if isinstance(leaf, np.generic):
        entry["scalar"] = True
    return entry, array.astype(dtype, copy=False).tobytes()


def _decode_leaf(entry: dict[str, Any], record: bytes, start: int) -> tuple[Any, int]:
    if "bytes" in entry:
        stop = start + entry["bytes"]
        return record[start:stop], stop
    if "texts" in entry:
        stops = list(itertools.accumulate(entry["texts"], initial=start))
        array = np.empty(len(entry["texts"]), object)
        array[:] = [record[a:b] for a, b in itertools.pairwise(stops)]
        return array.reshape(entry["shape"]), stops[-1]
    dtype = np.dtype(entry["dtype"])
    count = math.prod(entry["shape"])
    array = np.frombuffer(record, dtype, count, start).reshape(entry["shape"])
    stop = start + count * dtype.itemsize
    return (array[()] if entry.get("scalar") else array), stop


def save_spec(spec: Spec) -> dict[str, Any]:
    """Returns a nest of TensorSpecs as data that JSON can hold."""
    leaves = [
        {"shape": leaf.shape, "dtype": None if leaf.dtype.hasobject else leaf.dtype.name}
        for leaf in elements.list_leaves(spec)
    ]
    return {"structure": _save_structure(spec), "leaves": leaves}


def load_spec(saved: dict[str, Any]) -> Spec:
    """Returns the nest of TensorSpecs that `save_spec` was given."""
    leaves = iter([TensorSpec(leaf["shape"], leaf["dtype"] or bytes) for leaf in saved["leaves"]])
    spec = _load_structure(saved["structure"], lambda: next(leaves, None))
    if None in elements.list_leaves(spec):
        raise ValueError("it has fewer leaves than its structure")
    return spec


def _save_structure(nest: Any) -> Any:
    if elements.is_namedtuple(nest):
        parts = [_save_structure(part) for part in nest]
        _classes.setdefault((type(nest).__name__, nest._fields), type(nest))
        return {"name": type(nest).__name__, "fields": nest._fields, "parts": parts}
    if isinstance(nest, tuple):
        return [_save_structure(part) for part in nest]
    if isinstance(nest, dict):
        return {"keys": list(nest), "parts": [_save_structure(part) for part in nest.values()]}
    return None


def _load_structure(saved: Any, next_leaf: Callable[[], Any]) -> Any:
    if saved is None:
        return next_leaf()
    if isinstance(saved, list):
        return tuple(_load_structure(part, next_leaf) for part in saved)
    parts = [_load_structure(part, next_leaf) for part in saved["parts"]]
    if "keys" in saved:
        return dict(zip(saved["keys"], parts, strict=True))
    name, fields = saved["name"], tuple(saved["fields"])
    # The class of the program that saved it may not be here.
    made = _classes.get((name, fields)) or _make_named_tuple(name, fields)
    return made(*parts)


@functools.cache
def _make_named_tuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple(name, fields)

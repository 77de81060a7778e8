"""Elements as bytes and back: structure and shapes as JSON, arrays as they are; no pickles."""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

from distribax.data import elements as nests
from distribax.data.element_spec import Spec, TensorSpec

_LENGTH = struct.Struct("<Q")


def encode(element: nests.Element) -> bytes:
    """Returns an element as bytes."""
    leaves = nests.leaves(element)
    described, parts = [], []
    for leaf in leaves:
        entry, payload = _encode_leaf(leaf)
        described.append(entry)
        parts.append(payload)
    header = json.dumps({"structure": _save_structure(element), "leaves": described}).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *parts])


def decode(record: bytes) -> nests.Element:
    """Returns the element that `encode` has turned into bytes."""
    start = _LENGTH.size + _LENGTH.unpack_from(record)[0]
    header = json.loads(record[_LENGTH.size : start])
    leaves = []
    for entry in header["leaves"]:
        leaf, start = _decode_leaf(entry, record, start)
        leaves.append(leaf)
    return _load_structure(header["structure"], iter(leaves).__next__)


def _encode_leaf(leaf: Any) -> tuple[dict[str, Any], bytes]:
    if isinstance(leaf, nests.DatasetLeaf):
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
    count = int(np.prod(entry["shape"], dtype=np.int64))
    array = np.frombuffer(record, dtype, count, start).reshape(entry["shape"])
    stop = start + count * dtype.itemsize
    return (array[()] if entry.get("scalar") else array), stop


def save_spec(spec: Spec) -> dict[str, Any]:
    """Returns a nest of TensorSpecs as data that JSON can hold."""
    leaves = [
        {"shape": leaf.shape, "dtype": None if leaf.dtype.hasobject else leaf.dtype.name}
        for leaf in nests.leaves(spec)
    ]
    return {"structure": _save_structure(spec), "leaves": leaves}


def load_spec(saved: dict[str, Any]) -> Spec:
    """Returns the nest of TensorSpecs that `save_spec` was given."""
    leaves = [TensorSpec(leaf["shape"], leaf["dtype"] or bytes) for leaf in saved["leaves"]]
    return _load_structure(saved["structure"], iter(leaves).__next__)


def _save_structure(nest: Any) -> Any:
    if nests.is_namedtuple(nest):
        parts = [_save_structure(part) for part in nest]
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
    return _named_tuple(saved["name"], tuple(saved["fields"]))(*parts)


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    # The class of the program that saved it may not be here.
    return namedtuple(name, fields)

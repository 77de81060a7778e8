"""The messages of TensorBoard's event files, encoded as protocol buffers.

Only what is written is here: a few fields of `Event`, `Summary`, `HistogramProto` and
`TensorProto`. The numbers are those of the fields in TensorFlow's .proto files, which never change.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

VERSION: Final = "brain.Event:2"
"""What the first event of each file says."""

_VARINT: Final = 0
_DOUBLE: Final = 1
_BYTES: Final = 2
_FLOAT: Final = 5
_STRING_TYPE: Final = 7
"""DT_STRING among TensorFlow's data types."""
_NUM_BUCKETS: Final = 30


def encode_event(
    wall_time: float, step: int, *, version: str | None = None, summary: bytes | None = None
) -> bytes:
    """Returns an event: the version of the file, or the value of a summary."""
    event = _encode_double(1, wall_time) + _encode_varint(2, step)
    if version is not None:
        event += _encode_bytes(3, version.encode())
    if summary is not None:
        event += _encode_bytes(5, _encode_bytes(1, summary))
    return event


def encode_scalar(tag: str, value: float) -> bytes:
    """Returns the value of a summary that is a number."""
    return _encode_bytes(1, tag.encode()) + _encode_key(2, _FLOAT) + struct.pack("<f", value)


def encode_text(tag: str, text: str) -> bytes:
    """Returns the value of a summary that is text, in Markdown."""
    metadata = _encode_bytes(1, _encode_bytes(1, b"text"))
    tensor = (
        _encode_varint(1, _STRING_TYPE) + _encode_bytes(2, b"") + _encode_bytes(8, text.encode())
    )
    return _encode_bytes(1, tag.encode()) + _encode_bytes(9, metadata) + _encode_bytes(8, tensor)


def encode_histogram(tag: str, values: np.ndarray) -> bytes:
    """Returns the value of a summary that says how often which values occur."""
    flat = np.asarray(values, np.float64).ravel()
    counts, edges = np.histogram(flat, _NUM_BUCKETS)
    histogram = (
        _encode_double(1, float(flat.min()))
        + _encode_double(2, float(flat.max()))
        + _encode_double(3, float(flat.size))
        + _encode_double(4, float(flat.sum()))
        + _encode_double(5, float(np.square(flat).sum()))
        + _encode_doubles(6, edges[1:].tolist())
        + _encode_doubles(7, counts.tolist())
    )
    return _encode_bytes(1, tag.encode()) + _encode_bytes(5, histogram)


def _encode_key(field: int, kind: int) -> bytes:
    return _encode_integer(field << 3 | kind)


def _encode_varint(field: int, value: int) -> bytes:
    return _encode_key(field, _VARINT) + _encode_integer(value)


def _encode_double(field: int, value: float) -> bytes:
    return _encode_key(field, _DOUBLE) + struct.pack("<d", value)


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_key(field, _BYTES) + _encode_integer(len(value)) + value


def _encode_doubles(field: int, values: Sequence[float]) -> bytes:
    return _encode_bytes(field, struct.pack(f"<{len(values)}d", *values))


def _encode_integer(value: int) -> bytes:
    """Returns a number in groups of 7 bits, the lowest first; negative ones as 64 bits."""
    value &= (1 << 64) - 1
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)

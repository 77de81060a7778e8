"""The records that TensorFlow users keep in TFRecord files: tf.train.Example, without TensorFlow.

An Example is a protocol buffer: a map from names to lists of bytes, floats or integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from distribax.data import elements as nests

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3
_LONGEST_VARINT, _WORD = 70, 2**64 - 1


@dataclass(frozen=True)
class FixedLenFeature:
    """A feature with as many values as its shape holds.

    Attributes:
        shape: The shape; [] for a single value.
        dtype: The data type; `str` or `bytes` for text.
        default_value: Takes the place of a feature that is missing in a record.
    """

    shape: tuple[int, ...] | list[int]
    dtype: DTypeLike
    default_value: ArrayLike | None = None


@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values, parsed to a 1-D array.

    Attributes:
        dtype: The data type; `str` or `bytes` for text.
    """

    dtype: DTypeLike


def parse_single_example(
    serialized: bytes, features: Mapping[str, FixedLenFeature | VarLenFeature]
) -> dict[str, Any]:
    """Parses one serialized tf.train.Example into a dict of arrays.

    Args:
        serialized: The record.
        features: What to read, by name.

    Returns:
        An array, a NumPy scalar or bytes for each of `features`.

    Raises:
        ValueError: The record is not an Example, or a feature is missing or has another shape.
        TypeError: A feature has another data type.

    >>> record = serialize_example({"label": 3, "pixels": [0.5, 1.0]})
    >>> parsed = parse_single_example(record, {"label": FixedLenFeature([], np.int64)})
    >>> int(parsed["label"])
    3
    """
    found = _parse_features(serialized)
    return {
        name: _parse_value(name, feature, found.get(name)) for name, feature in features.items()
    }


def parse_example(
    serialized: Iterable[bytes], features: Mapping[str, FixedLenFeature]
) -> dict[str, np.ndarray[Any, Any]]:
    """Parses a batch of serialized tf.train.Examples into a dict of batches.

    Args:
        serialized: The records.
        features: What to read, by name.

    Returns:
        An array for each of `features`, with the records along its first dimension.
    """
    return nests.stack([parse_single_example(record, features) for record in serialized])


def _parse_value(
    name: str, feature: FixedLenFeature | VarLenFeature, found: np.ndarray[Any, Any] | None
) -> Any:
    is_text = feature.dtype in (str, bytes, object, "string")
    dtype = np.dtype(object if is_text else feature.dtype)
    if isinstance(feature, VarLenFeature):
        return np.empty(0, dtype) if found is None else _convert(name, found, dtype)
    shape = tuple(feature.shape)
    if found is None:
        if feature.default_value is None:
            raise ValueError(
                f"the feature {name!r} is missing in an example and has no default_value. Give "
                "FixedLenFeature one, or use VarLenFeature."
            )
        return np.broadcast_to(np.asarray(feature.default_value, dtype), shape)[()]
    if found.size != int(np.prod(shape)):
        raise ValueError(
            f"the feature {name!r} has {found.size} values in an example, which do not fill the "
            f"shape {list(shape)}. Correct its FixedLenFeature, or use VarLenFeature."
        )
    return _convert(name, found, dtype).reshape(shape)[()]


def _convert(name: str, found: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Any:
    if (found.dtype.kind == "O") != (dtype.kind == "O") or (
        found.dtype.kind == "f" and dtype.kind in "iub"
    ):
        stored = {"O": "bytes", "f": "float32", "i": "int64"}[found.dtype.kind]
        raise TypeError(f"the feature {name!r} holds {stored}, not {dtype}, in an example.")
    return found.astype(dtype, copy=False)


def _parse_features(example: bytes) -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    try:
        for number, features in _iterate_fields(example):
            if number != 1:
                continue
            for _, entry in _iterate_fields(features):
                parts = dict(_iterate_fields(entry))
                # A feature that was never set has no list, and counts as missing.
                for kind, values in _iterate_fields(parts.get(2, b"")):
                    found[parts[1].decode()] = _parse_list(kind, values)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the record of {len(example)} bytes is not a serialized tf.train.Example."
        ) from error
    return found


def _iterate_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and content of every field of a message."""
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        number, wire = tag >> 3, tag & 7
        if wire == _LENGTH:
            size, position = _read_varint(message, position)
            if position + size > end:
                raise ValueError("a field runs past the end")
            yield number, message[position : position + size]
            position += size
        elif wire == _VARINT:
            value, position = _read_varint(message, position)
            yield number, value
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
            yield number, message[position : position + size]
            position += size
        else:
            raise ValueError(f"unknown wire type {wire}")


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, _LONGEST_VARINT, 7):
        byte = message[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _WORD, position
    raise ValueError("a number has more than 64 bits")


def _parse_list(kind: int, values: bytes) -> np.ndarray[Any, Any]:
    contents = [content for _, content in _iterate_fields(values)]
    if kind == _BYTES:
        result = np.empty(len(contents), object)
        result[:] = contents
        return result
    if kind == _FLOATS:
        # Packed they are one field, unpacked one each; the bytes are the same.
        return np.frombuffer(b"".join(contents), "<f4").astype(np.float32, copy=False)
    integers: list[int] = []
    for content in contents:
        integers += [content] if isinstance(content, int) else _unpack_varints(content)
    return np.array(integers, np.uint64).astype(np.int64)


def _unpack_varints(content: bytes) -> list[int]:
    position, found = 0, []
    while position < len(content):
        value, position = _read_varint(content, position)
        found.append(value)
    return found


def serialize_example(features: Mapping[str, object]) -> bytes:
    """Serializes values as a tf.train.Example.

    Args:
        features: Numbers, text, bytes, or lists or arrays of them, by name.

    Returns:
        The record.
    """
    entries = b"".join(
        encode_field(
            1,
            encode_field(1, name.encode())
            + encode_field(2, _encode_feature(nests.to_element(value))),
        )
        for name, value in features.items()
    )
    return encode_field(1, entries)


def _encode_feature(value: nests.Element) -> bytes:
    if isinstance(value, bytes):
        return encode_field(_BYTES, encode_field(1, value))
    flat = np.asarray(value).ravel()
    if flat.dtype.kind == "O":
        return encode_field(_BYTES, b"".join(encode_field(1, item) for item in flat))
    if flat.dtype.kind == "f":
        return encode_field(_FLOATS, encode_field(1, flat.astype("<f4").tobytes()))
    words = flat.astype(np.int64).astype(np.uint64).tolist()
    return encode_field(_INTEGERS, encode_field(1, b"".join(map(encode_varint, words))))


def encode_field(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer that holds bytes."""
    return encode_varint(number << 3 | _LENGTH) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    """Returns a number as protocol buffers hold it: seven bits in each byte."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)

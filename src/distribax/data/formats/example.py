"""The records that TensorFlow users keep in TFRecord files: tf.train.Example, without TensorFlow.

An Example is a protocol buffer: a map from names to lists of bytes, floats or integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import ArrayLike, DTypeLike

from distribax.data import elements

_PACKAGE = "distribax.example"
"""Not TensorFlow's: a program may load that as well, and both would claim the names."""


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
    return elements.stack([parse_single_example(record, features) for record in serialized])


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
        default = np.broadcast_to(np.asarray(feature.default_value, dtype), shape)
        return elements.to_element(default[()])
    if found.size != math.prod(shape):
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
    converted = found.astype(dtype, copy=False)
    if dtype.kind in "iub" and (converted != found).any():
        raise ValueError(
            f"the feature {name!r} has {elements.shorten(found.tolist())} in an example, which "
            f"{dtype} cannot hold. Use np.int64."
        )
    return converted


def _parse_features(example: bytes) -> dict[str, np.ndarray[Any, Any]]:
    try:
        features = _Example.FromString(example).features.feature
    except (DecodeError, TypeError) as error:
        raise ValueError(
            f"the record of {len(example)} bytes is not a serialized tf.train.Example."
        ) from error
    found = {name: _parse_list(feature) for name, feature in features.items()}
    # A feature that was never set has no list, and counts as missing.
    return {name: values for name, values in found.items() if values is not None}


def _parse_list(feature: Any) -> np.ndarray[Any, Any] | None:
    match feature.WhichOneof("kind"):
        case "bytes_list":
            contents = feature.bytes_list.value
            result = np.empty(len(contents), object)
            result[:] = contents
            return result
        case "float_list":
            return np.array(feature.float_list.value, np.float32)
        case "int64_list":
            return np.array(feature.int64_list.value, np.int64)
        case _:
            return None


def serialize_example(features: Mapping[str, object]) -> bytes:
    """Serializes values as a tf.train.Example.

    Args:
        features: Numbers, text, bytes, or lists or arrays of them, by name.

    Returns:
        The record.
    """
    example = _Example()
    for name, value in features.items():
        _fill(example.features.feature[name], elements.to_element(value))
    return cast(bytes, example.SerializeToString(deterministic=True))


def _fill(feature: Any, value: elements.Element) -> None:
    flat = np.asarray([value] if isinstance(value, bytes) else value).ravel()
    if isinstance(value, bytes):
        feature.bytes_list.value.append(value)
    elif flat.dtype.kind == "O":
        # A list that is set but empty is not the same as one that is missing.
        feature.bytes_list.SetInParent()
        feature.bytes_list.value.extend(flat.tolist())
    elif flat.dtype.kind == "f":
        feature.float_list.SetInParent()
        feature.float_list.value.extend(flat.astype(np.float32).tolist())
    else:
        feature.int64_list.SetInParent()
        feature.int64_list.value.extend(flat.astype(np.int64).tolist())


def _make_message_class() -> Any:
    """Returns the class of the messages: what protoc would write for TensorFlow's example.proto."""
    proto = descriptor_pb2.FileDescriptorProto(
        name="distribax_example.proto", package=_PACKAGE, syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    lists = {
        "BytesList": ("bytes_list", field.TYPE_BYTES),
        "FloatList": ("float_list", field.TYPE_FLOAT),
        "Int64List": ("int64_list", field.TYPE_INT64),
    }
    for message, (_, kind) in lists.items():
        repeated = proto.message_type.add(name=message).field
        repeated.add(name="value", number=1, label=field.LABEL_REPEATED, type=kind)

    def add(owner: Any, name: str, number: int, message: str, **more: int) -> None:
        path = f".{_PACKAGE}.{message}"
        options = {"label": field.LABEL_OPTIONAL, "type": field.TYPE_MESSAGE} | more
        owner.field.add(name=name, number=number, type_name=path, **options)

    feature = proto.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (message, (name, _)) in enumerate(lists.items(), start=1):
        add(feature, name, number, message, oneof_index=0)
    features = proto.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    add(entry, "value", 2, "Feature")
    add(features, "feature", 1, "Features.FeatureEntry", label=field.LABEL_REPEATED)
    add(proto.message_type.add(name="Example"), "features", 1, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


_Example = _make_message_class()

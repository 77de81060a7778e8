"""tf.train.Example without TensorFlow."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import (
    FixedLenFeature,
    TFRecordDataset,
    TFRecordWriter,
    VarLenFeature,
    parse_example,
    parse_single_example,
    serialize_example,
)

# Serialised by TensorFlow: a=[1, -5, 2**40], b=[1.5, 2.5], c=[b"x", b"yy"], e never set, f=[].
BY_TENSORFLOW = base64.b64decode(
    "Ck8KDgoBYxIJCgcKAXgKAnl5ChoKAWESFRoTChEB+///////////AYCAgICAIAoRCgFiEgwSCgoIAADAPwAAIEAK"
    "BQoBZRIACgcKAWYSAhoA"
)


def test_an_example_of_tensorflow_is_parsed() -> None:
    parsed = parse_single_example(
        BY_TENSORFLOW,
        {
            "a": FixedLenFeature([3], np.int64),
            "b": FixedLenFeature([2, 1], np.float32),
            "c": VarLenFeature(bytes),
            "e": VarLenFeature(np.int64),
            "f": VarLenFeature(np.int64),
            "missing": FixedLenFeature([2], np.float32, default_value=7.0),
        },
    )
    assert parsed["a"].tolist() == [1, -5, 2**40]
    assert parsed["b"].tolist() == [[1.5], [2.5]]
    assert parsed["b"].dtype == np.float32
    assert parsed["c"].tolist() == [b"x", b"yy"]
    assert parsed["e"].tolist() == parsed["f"].tolist() == []
    assert parsed["missing"].tolist() == [7.0, 7.0]


def test_what_is_serialised_is_parsed_again(tmp_path: Path) -> None:
    path = str(tmp_path / "examples")
    with TFRecordWriter(path) as writer:
        for number in range(4):
            writer.write(
                serialize_example(
                    {"n": number, "v": [0.5 * number, 1.0], "t": "text" * 50, "b": [b"q"], "m": -1}
                )
            )
    features: dict[str, Any] = {
        "n": FixedLenFeature([], np.int32),
        "v": FixedLenFeature((2,), np.float32),
        "t": FixedLenFeature([], str),
        "b": FixedLenFeature([1], bytes),
        "m": FixedLenFeature([], np.int64),
    }
    records = TFRecordDataset(path)
    first = next(iter(records.map(lambda record: parse_single_example(record, features))))
    assert first["n"] == 0
    assert first["n"].dtype == np.int32
    assert first["t"] == b"text" * 50
    assert first["m"] == -1
    (batch,) = records.batch(4).map(lambda batch: parse_example(batch, features))
    assert batch["n"].tolist() == [0, 1, 2, 3]
    assert batch["v"].shape == (4, 2)
    assert batch["b"].tolist() == [[b"q"]] * 4


def test_lists_that_are_not_packed() -> None:
    # Older writers give every number a field of its own.
    float_list = b"\x0d" + np.float32(1.5).tobytes() + b"\x0d" + np.float32(2.5).tobytes()
    int_list = b"\x08\x05\x08\x06"
    double = b"\x11" + bytes(8)

    def entry(name: bytes, kind: int, values: bytes) -> bytes:
        feature = bytes([kind << 3 | 2, len(values)]) + values
        content = b"\x0a\x01" + name + b"\x12" + bytes([len(feature)]) + feature
        return b"\x0a" + bytes([len(content)]) + content

    features = entry(b"f", 2, float_list) + entry(b"i", 3, int_list)
    # A field of another number, of the kind of eight bytes, is passed over.
    example = double + b"\x0a" + bytes([len(features)]) + features
    parsed = parse_single_example(
        example, {"f": VarLenFeature(np.float32), "i": VarLenFeature(np.int64)}
    )
    assert parsed["f"].tolist() == [1.5, 2.5]
    assert parsed["i"].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("record", "feature", "error", "message"),
    [
        (BY_TENSORFLOW, FixedLenFeature([2], np.int64), ValueError, "has 3 values"),
        (BY_TENSORFLOW, FixedLenFeature([3], bytes), TypeError, "holds int64, not object"),
        (b"", FixedLenFeature([3], np.int64), ValueError, "missing in an example"),
        (b"no example", FixedLenFeature([3], np.int64), ValueError, "not a serialized"),
        (b"\x0a\x7f", FixedLenFeature([3], np.int64), ValueError, "not a serialized"),
        (b"\x0b", FixedLenFeature([3], np.int64), ValueError, "not a serialized"),
    ],
)
def test_records_that_do_not_fit(
    record: bytes, feature: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_single_example(record, {"a": feature})


def test_floats_are_not_cut_to_integers() -> None:
    with pytest.raises(TypeError, match="holds float32, not int64"):
        parse_single_example(BY_TENSORFLOW, {"b": VarLenFeature(np.int64)})


def test_text_that_is_missing_is_the_default_as_bytes() -> None:
    records = [serialize_example({}), serialize_example({"t": "given"})]
    features = {
        "t": FixedLenFeature([], str, "none"),
        "l": FixedLenFeature([2], str, ["a", "b"]),
    }
    parsed = parse_single_example(records[0], features)
    assert (parsed["t"], parsed["l"].tolist()) == (b"none", [b"a", b"b"])
    assert parse_example(records, features)["t"].tolist() == [b"none", b"given"]


def test_integers_that_the_type_cannot_hold() -> None:
    record = serialize_example({"n": [1, 2**40]})
    with pytest.raises(ValueError, match=r"'n' has \[1, 1099511627776\] .* int32 cannot hold"):
        parse_single_example(record, {"n": VarLenFeature(np.int32)})

"""Reading and writing files: formats, compression, and damage that is found and named."""

from __future__ import annotations

import base64
import gzip
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distribax.data import (
    AUTOTUNE,
    ArrayRecordDataset,
    CorruptRecordError,
    Dataset,
    FixedLengthRecordDataset,
    ParquetDataset,
    TensorSpec,
    TextLineDataset,
    TFRecordDataset,
    TFRecordWriter,
)
from distribax.data.formats.tfrecord import masked_crc32c
from tests.unit.data.reference import values_of

RECORDS = [b"first", b"", b"third record"]
# Written by tf.io.TFRecordWriter of TensorFlow 2.21.
BY_TENSORFLOW = {
    "": "BQAAAAAAAADqsgQ+Zmlyc3RV/yPlAAAAAAAAAAApA5gH2OqCogwAAAAAAAAA9Mj+CnRoaXJkIHJlY29yZM3FcvA=",
    "GZIP": "H4sIAAAAAAAAA2NlgIBXm1js0jKLiktC/ys/hYoxaDLPYL/xqmkRD5T/5cQ/rpKMzKIUhaLU5PyilLNHiz4A"
    "AJdg8DpBAAAA",
    "ZLIB": "eJxjZYCAV5tY7NIyi4pLQv8rP4WKMWgyz2C/8appEQ+U/+XEP66SjMyiFIWi1OT8opSzR4s+AAAosxSX",
}


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_tfrecords_of_tensorflow_are_read_and_ours_are_the_same(
    compression: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.write_bytes(base64.b64decode(BY_TENSORFLOW[compression]))
    with TFRecordWriter(str(ours), compression) as writer:
        for record in RECORDS:
            writer.write(record)
    writer.close()
    for path in (theirs, ours):
        assert values_of(TFRecordDataset(path, compression)) == RECORDS
    if not compression:
        assert ours.read_bytes() == theirs.read_bytes()
    assert TFRecordDataset(ours).element_spec == TensorSpec((), bytes)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("buffer_size", [None, 1, 100])
def test_records_larger_and_smaller_than_the_buffer(
    compression: str, buffer_size: int | None, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    records = [random.bytes(int(size)) for size in random.integers(0, 900, 40)]
    records.insert(20, random.bytes(600_000))
    path = str(tmp_path / "records")
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    dataset = TFRecordDataset(path, compression, buffer_size)
    assert values_of(dataset) == records
    iterator = dataset.make_iterator()
    for _ in range(25):
        next(iterator)
    other = dataset.make_iterator()
    other.set_state(iterator.get_state())
    assert list(other) == records[25:]


def _flip(position: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1
        return bytes(changed)

    return damage


# The records begin at bytes 0, 21 and 37; the file has 65.
@pytest.mark.parametrize(
    ("damage", "offset", "problem", "before"),
    [
        (_flip(0), 0, "length", 0),
        (_flip(10), 0, "length", 0),
        (_flip(14), 0, "checksum", 0),
        (_flip(20), 0, "checksum", 0),
        (_flip(50), 37, "damaged record", 2),
        (lambda content: content[:-1], 37, "cut short", 2),
        (lambda content: content[:45], 37, "header cut short .8 bytes", 2),
        (lambda content: content[:50], 37, "cut short .1 of 16 bytes", 2),
    ],
)
def test_damaged_records_are_named(
    damage: Callable[[bytes], bytes], offset: int, problem: str, before: int, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(damage(base64.b64decode(BY_TENSORFLOW[""])))
    iterator = TFRecordDataset(path).make_iterator()
    for record in RECORDS[:before]:
        assert next(iterator) == record
    with pytest.raises(CorruptRecordError, match=problem) as caught:
        next(iterator)
    assert caught.value.filename == str(path)
    assert caught.value.offset == offset
    assert f"{path}: " in str(caught.value)
    assert f"at byte offset {offset}" in str(caught.value)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("length", [100, 2**40, 2**62, 2**64 - 1])
def test_lengths_that_cannot_be(compression: str, length: int, tmp_path: Path) -> None:
    """A length with the right checksum, as of a file that was forged or written over."""
    size = struct.pack("<Q", length)
    content = size + struct.pack("<I", masked_crc32c(size)) + b"few bytes"
    wbits = {"GZIP": 31, "ZLIB": 15}
    if compression:
        deflate = zlib.compressobj(wbits=wbits[compression])
        content = deflate.compress(content) + deflate.flush()
    path = tmp_path / "forged"
    path.write_bytes(content)
    with pytest.raises(CorruptRecordError, match=r"cut short .9 of \d+ bytes"):
        values_of(TFRecordDataset(path, compression))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("damage", [lambda c: c[:-12], _flip(20), lambda c: b"no archive" + c])
def test_damaged_archives_are_named(
    compression: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(damage(base64.b64decode(BY_TENSORFLOW[compression])))
    with pytest.raises(CorruptRecordError, match="damaged"):
        values_of(TFRecordDataset(path, compression))


def test_a_position_beyond_an_archive_that_became_shorter_is_an_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(zlib.compress(b"one\ntwo\nthree\n"))
    dataset = TextLineDataset(path, "ZLIB")
    iterator = dataset.make_iterator()
    assert [next(iterator), next(iterator)] == [b"one", b"two"]
    state = iterator.get_state()
    path.write_bytes(zlib.compress(b"one\n"))
    other = dataset.make_iterator()
    other.set_state(state)
    assert list(other) == []


def test_several_files_in_order_or_in_turns(tmp_path: Path) -> None:
    names = []
    for name, count in (("a", 1), ("b", 3), ("c", 2)):
        names.append(str(tmp_path / name))
        with TFRecordWriter(names[-1]) as writer:
            for number in range(count):
                writer.write(f"{name}{number}".encode())
    in_order = [b"a0", b"b0", b"b1", b"b2", b"c0", b"c1"]
    in_turns = [b"a0", b"b0", b"b1", b"c0", b"b2", b"c1"]
    assert values_of(TFRecordDataset(names)) == in_order
    assert values_of(TFRecordDataset(names, num_parallel_reads=2)) == in_turns
    assert sorted(values_of(TFRecordDataset(names, num_parallel_reads=AUTOTUNE))) == in_order
    of_names = Dataset.from_tensor_slices(names)
    assert values_of(TFRecordDataset(of_names)) == in_order
    assert values_of(TFRecordDataset(of_names, num_parallel_reads=2)) == in_turns
    assert values_of(TFRecordDataset(names[0].encode())) == [b"a0"]


def test_records_that_arrive_in_small_portions(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = base64.b64decode(BY_TENSORFLOW[""])

    def feed() -> None:
        with open(path, "wb", buffering=0) as pipe:
            for byte in content:
                pipe.write(bytes([byte]))

    writer = threading.Thread(target=feed)
    writer.start()
    assert values_of(TFRecordDataset(path)) == RECORDS
    writer.join()


def test_text_lines_as_tf_data_reads_them(tmp_path: Path) -> None:
    content = b"a\r\nb\n\nc\rd\ne"
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "zipped").write_bytes(gzip.compress(content))
    expected = [b"a", b"b", b"", b"cd", b"e"]
    assert values_of(TextLineDataset(tmp_path / "plain")) == expected
    assert values_of(TextLineDataset(tmp_path / "plain", buffer_size=2)) == expected
    assert values_of(TextLineDataset(tmp_path / "zipped", "GZIP")) == expected
    (tmp_path / "empty").write_bytes(b"")
    assert values_of(TextLineDataset([tmp_path / "empty", tmp_path / "plain"])) == expected


def test_records_of_fixed_length(tmp_path: Path) -> None:
    path = tmp_path / "fixed"
    path.write_bytes(b"HHaabbccF")
    for buffer_size in (None, 1, 4):
        dataset = FixedLengthRecordDataset(path, 2, 2, 1, buffer_size)
        assert values_of(dataset) == [b"aa", b"bb", b"cc"]
        iterator = dataset.make_iterator()
        next(iterator)
        other = dataset.make_iterator()
        other.set_state(iterator.get_state())
        assert list(other) == [b"bb", b"cc"]
    with pytest.raises(CorruptRecordError, match=r"1 bytes are left over.* offset 8"):
        values_of(FixedLengthRecordDataset(path, 2, header_bytes=2))


def test_parquet_rows_are_dicts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {"n": np.arange(5), "t": list("abcde"), "v": [[float(i)] * i for i in range(5)]}
    )
    path = tmp_path / "table.parquet"
    parquet.write_table(table, path, row_group_size=2)
    dataset = ParquetDataset(path)
    expected = [{"n": i, "t": "abcde"[i].encode(), "v": [float(i)] * i} for i in range(5)]
    assert values_of(dataset) == expected
    assert dataset.element_spec["n"] == TensorSpec((), np.int64)
    narrow = ParquetDataset([path, path], columns=["n"])
    assert values_of(narrow.batch(4)) == [{"n": [0, 1, 2, 3]}, {"n": [4, 0, 1, 2]}, {"n": [3, 4]}]
    iterator = dataset.make_iterator()
    for position in range(6):
        other = dataset.make_iterator()
        other.set_state(iterator.get_state())
        assert [int(row["n"]) for row in other] == list(range(position, 5))
        next(iterator, None)
    with pytest.raises(ValueError, match=r"names \['x'\].*columns are \['n', 't', 'v'\]"):
        values_of(ParquetDataset(path, columns=["x"]))


def test_damaged_parquet_pages_are_found(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    numbers = np.arange(4000) * 7919 % 4001
    path = tmp_path / "table.parquet"
    parquet.write_table(
        pyarrow.table({"n": numbers}), path, use_dictionary=False, compression="none",
        write_page_checksum=True, row_group_size=2000,
    )  # fmt: skip
    content = bytearray(path.read_bytes())
    assert len(values_of(ParquetDataset(path))) == 4000
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)
    iterator = ParquetDataset(path).make_iterator()
    for number in numbers[:2000]:
        assert next(iterator)["n"] == number
    with pytest.raises(CorruptRecordError, match=r"row group 1.*CRC") as caught:
        next(iterator)
    assert caught.value.filename == str(path)
    path.write_bytes(content[:-100])
    with pytest.raises(CorruptRecordError, match="not a Parquet file, or damaged"):
        values_of(ParquetDataset(path))
    with pytest.raises(FileNotFoundError):
        values_of(ParquetDataset(tmp_path / "none.parquet"))


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        values_of(ParquetDataset("table.parquet"))


def test_array_records_are_read_by_position(tmp_path: Path) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name in names:
        writer = module.ArrayRecordWriter(name, "group_size:1")
        for number in range(3):
            writer.write(f"{name[-1]}{number}".encode())
        writer.close()
    dataset = ArrayRecordDataset(names)
    expected = [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]
    assert len(dataset) == 6
    assert values_of(dataset) == expected
    assert dataset.element_spec == TensorSpec((), bytes)
    shuffled = values_of(dataset.shuffle(6, seed=1).batch(4))
    assert [len(batch) for batch in shuffled] == [4, 2]
    assert sorted(shuffled[0] + shuffled[1]) == expected


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TFRecordDataset([]), ValueError, "filenames is empty"),
        (lambda: TFRecordDataset(3), TypeError, "filenames=3"),
        (lambda: TFRecordDataset([3]), TypeError, r"filenames=\[3\]"),
        (lambda: TFRecordDataset("a", "BZIP"), ValueError, "compression_type='BZIP'"),
        (lambda: TFRecordDataset("a", buffer_size=-1), ValueError, "buffer_size=-1"),
        (lambda: TFRecordDataset("a", num_parallel_reads=0), ValueError, "num_parallel_reads=0"),
        (lambda: TFRecordDataset("a", buffer_size="b"), TypeError, "buffer_size='b' of type str"),
        (lambda: FixedLengthRecordDataset("a", "b"), TypeError, "record_bytes='b' of type str"),
        (lambda: FixedLengthRecordDataset("a", 1, "b"), TypeError, "header_bytes='b' of type str"),
        (lambda: ParquetDataset("a", "column"), TypeError, "columns='column'"),
        (lambda: FixedLengthRecordDataset("a", 0), ValueError, "record_bytes=0"),
        (lambda: FixedLengthRecordDataset("a", 1, -1), ValueError, "header_bytes=-1"),
        (lambda: values_of(TFRecordDataset("no/such/file")), FileNotFoundError, "no/such/file"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_writer_takes_bytes_only(tmp_path: Path) -> None:
    with (
        TFRecordWriter(str(tmp_path / "f")) as writer,
        pytest.raises(TypeError, match="record='text' of type str"),
    ):
        writer.write("text")  # type: ignore[arg-type]

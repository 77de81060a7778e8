"""TFRecord files: length-prefixed records, each part guarded by a masked CRC-32C."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import IO

import google_crc32c
from typing_extensions import override

from distribax.data.element_spec import TensorSpec
from distribax.data.formats.record_format import ChunkReader, CorruptRecordError, FileOpening

_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_FRAME = _HEADER.size + _CRC.size
_MASK_DELTA = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Returns the checksum that TFRecord files store for `data`."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@dataclass(frozen=True)
class TFRecordFormat:
    """The format of TFRecord files; records are bytes."""

    opening: FileOpening = field(default_factory=FileOpening)
    name: str = "tfrecord"
    spec: TensorSpec = field(default_factory=lambda: TensorSpec((), bytes))

    def open(self, filename: str, offset: int | None = None) -> TFRecordReader:
        """Opens a file at the byte where a record begins."""
        return TFRecordReader(filename, self.opening, offset or 0)


class TFRecordReader(ChunkReader):
    """The records of one open file, each checked."""

    @override
    def _read(self) -> Generator[bytes, None, None]:
        read, crc = self._file.read, google_crc32c.value
        header_of, crc_of = _HEADER.unpack_from, _CRC.unpack_from
        buffer, begin, offset = b"", 0, self.offset
        while True:
            if len(buffer) - begin < _HEADER.size:
                buffer, begin = buffer[begin:] + read(_HEADER.size), 0
                if not buffer:
                    return
                if len(buffer) < _HEADER.size:
                    raise self._make_error(offset, f"record header cut short ({len(buffer)} bytes)")
            length, stored = header_of(buffer, begin)
            # Masking is written out in this loop: a call per record would cost as much again.
            check = crc(buffer[begin : begin + 8])
            if ((check >> 15 | check << 17) + _MASK_DELTA) & 0xFFFFFFFF != stored:
                raise self._make_error(offset, "damaged record length (its checksum is wrong)")
            end = begin + _HEADER.size + length
            if len(buffer) < end + _CRC.size:
                missing = end + _CRC.size - len(buffer)
                buffer = buffer[begin:] + read(missing)
                begin, end = 0, _HEADER.size + length
                if len(buffer) < end + _CRC.size:
                    have = len(buffer) - _HEADER.size
                    raise self._make_error(
                        offset, f"record cut short ({have} of {length + _CRC.size} bytes)"
                    )
            data = buffer[begin + _HEADER.size : end]
            (stored,) = crc_of(buffer, end)
            check = crc(data)
            if ((check >> 15 | check << 17) + _MASK_DELTA) & 0xFFFFFFFF != stored:
                raise self._make_error(offset, "damaged record (its checksum is wrong)")
            begin = end + _CRC.size
            offset += _FRAME + length
            self.offset = offset
            yield data

    def _make_error(self, offset: int, problem: str) -> CorruptRecordError:
        return CorruptRecordError(self._file.filename, offset, problem)


class TFRecordWriter:
    """Writes TFRecord files that TensorFlow and `TFRecordDataset` read.

    Args:
        path: The name of the file; an existing one is replaced.
        compression_type: "GZIP", "ZLIB", or "" or None for no compression.

    Raises:
        ValueError: The compression type is not known.

    >>> with TFRecordWriter("example.tfrecord") as writer:  # doctest: +SKIP
    ...     writer.write(b"one record")
    """

    def __init__(self, path: str, compression_type: str | None = None) -> None:
        opening = FileOpening(compression_type)
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115
        # zlib's wbits: 31 writes a gzip header and trailer, 15 a zlib stream.
        wbits = {"GZIP": 31, "ZLIB": 15}.get(opening.compression_type or "")
        self._deflate = zlib.compressobj(wbits=wbits) if wbits else None

    def write(self, record: bytes) -> None:
        """Appends one record.

        Args:
            record: Its content.

        Raises:
            TypeError: `record` is not bytes.
        """
        if not isinstance(record, bytes):
            raise TypeError(
                f"record={record!r} of type {type(record).__name__} is not bytes. Serialise it "
                "first, for example with array.tobytes()."
            )
        length = _LENGTH.pack(len(record))
        frame = b"".join(
            (length, _CRC.pack(masked_crc32c(length)), record, _CRC.pack(masked_crc32c(record)))
        )
        self._file.write(self._deflate.compress(frame) if self._deflate else frame)

    def flush(self) -> None:
        """Hands what was written to the operating system, so that others can read it."""
        if self._deflate:
            self._file.write(self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Finishes the file; further calls do nothing."""
        if not self._file.closed:
            if self._deflate:
                self._file.write(self._deflate.flush())
            self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

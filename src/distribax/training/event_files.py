"""Numbers for TensorBoard: event files, without TensorFlow."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from distribax.data.formats.example import encode_field, encode_varint
from distribax.data.formats.tfrecord import TFRecordWriter

_TIME, _STEP, _VERSION, _SUMMARY = 1, 2, 3, 5
_DOUBLE, _FLOAT = 1, 5


class EventFile:
    """A file of numbers by name and step, which is made when there is something to write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: TFRecordWriter | None = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends numbers, each with its name; they are in the file when this returns."""
        if self._writer is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{time.monotonic_ns()}"
            self._writer = TFRecordWriter(str(self._directory / name))
            self._writer.write(_stamp() + encode_field(_VERSION, b"brain.Event:2"))
        values = [
            encode_field(1, name.encode()) + encode_varint(2 << 3 | _FLOAT) + struct.pack("<f", x)
            for name, x in numbers.items()
        ]
        summary = b"".join(encode_field(1, value) for value in values)
        count = encode_varint(_STEP << 3) + encode_varint(step)
        self._writer.write(_stamp() + count + encode_field(_SUMMARY, summary))
        self._writer.flush()

    def close(self) -> None:
        """Finishes the file."""
        if self._writer is not None:
            self._writer.close()


def _stamp() -> bytes:
    return encode_varint(_TIME << 3 | _DOUBLE) + struct.pack("<d", time.time())

"""Files read as lines or as records of one fixed length."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from typing_extensions import override

from distribax.data import arguments as check
from distribax.data.element_spec import TensorSpec
from distribax.data.formats.record_format import ChunkReader, CorruptRecordError, FileOpening


@dataclass(frozen=True)
class TextLineFormat:
    """The lines of a text file, as bytes without their line ends."""

    opening: FileOpening = field(default_factory=FileOpening)
    name: str = "text_line"
    spec: TensorSpec = field(default_factory=lambda: TensorSpec((), bytes))

    def open(self, filename: str, offset: int | None = None) -> _LineReader:
        """Opens a file at the byte where a line begins."""
        return _LineReader(filename, self.opening, offset or 0)


class _LineReader(ChunkReader):
    @override
    def _read(self) -> Generator[bytes, None, None]:
        buffer = b""
        while chunk := self._file.read():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                self.offset += len(line) + 1
                # tf.data leaves out every carriage return, not only one before a line's end.
                yield line.replace(b"\r", b"")
        if buffer:
            self.offset += len(buffer)
            yield buffer.replace(b"\r", b"")


@dataclass(frozen=True)
class FixedLengthFormat:
    """Records of one length, between a header and a footer that are skipped."""

    record_bytes: int
    header_bytes: int = 0
    footer_bytes: int = 0
    opening: FileOpening = field(default_factory=FileOpening)
    name: str = "fixed_length_record"
    spec: TensorSpec = field(default_factory=lambda: TensorSpec((), bytes))

    def __post_init__(self) -> None:
        if check.whole_number(self.record_bytes, "record_bytes") <= 0:
            raise ValueError(
                f"record_bytes={self.record_bytes} is not a length. Expected the number of bytes "
                "of a record, at least 1."
            )
        for name in ("header_bytes", "footer_bytes"):
            if check.whole_number(getattr(self, name), name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} is negative. Expected a number of bytes to skip."
                )

    def open(self, filename: str, offset: int | None = None) -> _FixedLengthReader:
        """Opens a file at the byte where a record begins."""
        return _FixedLengthReader(filename, self, self.header_bytes if offset is None else offset)


class _FixedLengthReader(ChunkReader):
    def __init__(self, filename: str, layout: FixedLengthFormat, offset: int) -> None:
        super().__init__(filename, layout.opening, offset)
        self._layout = layout

    @override
    def _read(self) -> Generator[bytes, None, None]:
        size, kept = self._layout.record_bytes, self._layout.footer_bytes
        buffer = b""
        while chunk := self._file.read(size):
            buffer += chunk
            # The footer's bytes are never a record: they stay behind until the file ends.
            count = max(0, len(buffer) - kept) // size
            for number in range(count):
                self.offset += size
                yield buffer[number * size : (number + 1) * size]
            buffer = buffer[count * size :]
        if len(buffer) != kept:
            left = len(buffer) - kept
            problem = (
                f"the content is not a whole number of {size}-byte records with "
                f"{self._layout.header_bytes} header and {kept} footer bytes "
                f"({left} bytes are left over)"
            )
            raise CorruptRecordError(self._file.filename, self.offset, problem)

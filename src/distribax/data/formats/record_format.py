"""What a file format offers: readers of its records that can start anywhere."""

from __future__ import annotations

import abc
import contextlib
import gzip
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import IO, Any, Generic, Protocol, Self, TypeVar

from typing_extensions import override

from distribax.data import arguments as check
from distribax.data.element_spec import TensorSpec
from distribax.errors import DistribaxError

COMPRESSIONS = ("", "GZIP", "ZLIB")
DEFAULT_BUFFER_SIZE = 256 * 1024
_MAX_READ = 64 * 1024 * 1024


class CorruptRecordError(DistribaxError, ValueError):
    """A file's content is damaged or cut short; names the file and the place.

    The offset counts bytes; in a compressed file, bytes of the uncompressed content.
    """

    def __init__(self, filename: str, offset: int, problem: str) -> None:
        # All arguments go to `args`, so that the error survives pickling between processes.
        super().__init__(filename, offset, problem)
        self.filename = filename
        self.offset = offset
        self.problem = problem

    @override
    def __str__(self) -> str:
        return f"{self.filename}: {self.problem} at byte offset {self.offset}"


_Offset = TypeVar("_Offset")


class OpenFile(Protocol):
    """What a reader closes at its end."""

    def close(self) -> None: ...


class RecordReader(abc.ABC, Generic[_Offset]):
    """An open file: an iterator of records that knows where the next one begins."""

    def __init__(self, file: OpenFile, offset: _Offset) -> None:
        self._file = file
        self.offset = offset
        self._records = self._read()

    @abc.abstractmethod
    def _read(self) -> Generator[Any, None, None]:
        """Yields the records from `offset` on, which it moves along."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._records)

    def close(self) -> None:
        """Closes the file."""
        self._records.close()
        self._file.close()


class RecordFormat(Protocol[_Offset]):
    """How the records of one file are found."""

    @property
    def name(self) -> str:
        """The name of the format in fingerprints."""
        ...

    @property
    def spec(self) -> TensorSpec | None:
        """The spec of a record; None if only a file can tell."""
        ...

    def open(self, filename: str, offset: _Offset | None = None) -> RecordReader[_Offset]:
        """Opens a file at a record's offset, as a reader gave it, or at its start."""
        ...


@dataclass(frozen=True)
class FileOpening:
    """How bytes come out of a file: its compression and how much is read at a time."""

    compression_type: str | None = None
    buffer_size: int | None = None

    def __post_init__(self) -> None:
        if (self.compression_type or "") not in COMPRESSIONS:
            raise ValueError(
                f"compression_type={self.compression_type!r} is not known. Expected '' (none), "
                "'GZIP' or 'ZLIB'."
            )
        if self.buffer_size is not None and check.whole_number(self.buffer_size, "buffer_size") < 0:
            raise ValueError(
                f"buffer_size={self.buffer_size} is negative. Expected a number of bytes, or None "
                "for the default."
            )

    @property
    def chunk_size(self) -> int:
        """How many bytes are read at a time."""
        return self.buffer_size or DEFAULT_BUFFER_SIZE

    def open(self, filename: str) -> ByteFile:
        """Opens a file for reading its uncompressed content."""
        if self.compression_type == "GZIP":
            return gzip.open(filename, "rb")
        raw = open(filename, "rb")  # noqa: SIM115
        return ZlibFile(raw) if self.compression_type == "ZLIB" else raw


class ByteFile(OpenFile, Protocol):
    """What reading needs of an open file."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, /) -> object: ...


class ZlibFile:
    """Reads a file of one zlib stream; seeks forward by reading."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._inflate = zlib.decompressobj()
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes, fewer only at the end."""
        parts: list[bytes] = []
        missing = size
        while missing and not (self._inflate.eof and not self._ready):
            if not self._ready:
                source = self._inflate.unconsumed_tail or self._raw.read(DEFAULT_BUFFER_SIZE)
                if not source:
                    raise EOFError("the zlib stream is cut short")
                self._ready = self._inflate.decompress(source, DEFAULT_BUFFER_SIZE)
                continue
            parts.append(self._ready[:missing])
            self._ready = self._ready[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def seek(self, offset: int) -> None:
        """Moves from the start to `offset`."""
        while offset:
            step = self.read(min(offset, DEFAULT_BUFFER_SIZE))
            if not step:
                return
            offset -= len(step)

    def close(self) -> None:
        self._raw.close()


class ChunkedFile:
    """Bytes of a file in chunks, with damage reported by name and offset."""

    def __init__(self, filename: str, opening: FileOpening, offset: int) -> None:
        self.filename = filename
        self.position = offset
        self._chunk_size = opening.chunk_size
        self._file = opening.open(filename)
        if offset:
            with self._name_damage():
                self._file.seek(offset)

    @contextlib.contextmanager
    def _name_damage(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = f"damaged compressed data ({error})"
            raise CorruptRecordError(self.filename, self.position, problem) from error

    def read(self, size: int = 0) -> bytes:
        """Returns the next chunk, of at least `size` bytes unless the file ends."""
        missing = max(size, self._chunk_size)
        parts: list[bytes] = []
        # A damaged length may be any number: only what is there is given memory.
        while missing > 0:
            with self._name_damage():
                part = self._file.read(min(missing, max(self._chunk_size, _MAX_READ)))
            if not part:
                break
            parts.append(part)
            missing -= len(part)
            self.position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._file.close()


class ChunkReader(RecordReader[int]):
    """The records of a file that is read in chunks; an offset is a number of bytes."""

    _file: ChunkedFile

    def __init__(self, filename: str, opening: FileOpening, offset: int = 0) -> None:
        super().__init__(ChunkedFile(filename, opening, offset), offset)

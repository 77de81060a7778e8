"""Data sets that are read from files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

from distribax.data import arguments as check
from distribax.data.dataset import Dataset
from distribax.data.dataset_options import AUTOTUNE
from distribax.data.element_spec import TensorSpec
from distribax.data.formats.parquet import ParquetFormat
from distribax.data.formats.record_format import FileOpening, RecordFormat
from distribax.data.formats.text import FixedLengthFormat, TextLineFormat
from distribax.data.formats.tfrecord import TFRecordFormat
from distribax.data.plan import order, sources
from distribax.data.plan.plan_node import Node

Filenames: TypeAlias = check.Path | Iterable[check.Path] | Dataset
"""The name of a file, several of them, or a data set of them."""

_AUTOMATIC_READS = 4


def _plan_reader(
    filenames: Filenames, file_format: RecordFormat[Any], num_parallel_reads: int | None
) -> Node:
    reads = check.num_threads(num_parallel_reads, "num_parallel_reads")
    cycle = _AUTOMATIC_READS if reads == AUTOTUNE else reads or 1

    def read(names: tuple[str, ...]) -> Node:
        return sources.FileReader(names, file_format, cycle)

    if not isinstance(filenames, Dataset):
        return read(_parse_names(filenames))
    # The names are a data set themselves: every one of them becomes a data set of records.
    return order.Interleave(filenames.plan, lambda name: Dataset(read(_parse_names(name))), cycle)


def _parse_names(filenames: check.Path | Iterable[check.Path]) -> tuple[str, ...]:
    if isinstance(filenames, (str, bytes, os.PathLike)):
        filenames = [filenames]
    try:
        names = tuple(os.fsdecode(name) for name in filenames)
    except TypeError:
        raise TypeError(
            f"filenames={filenames!r} is not understood. Expected a file name, a list of them, or "
            "a Dataset of them."
        ) from None
    if not names:
        raise ValueError("filenames is empty. Expected at least one file name.")
    return names


class _RecordDataset(Dataset):
    """The records of files that may be compressed."""

    _format: ClassVar[Callable[[FileOpening], RecordFormat[int]]]

    def __init__(
        self,
        filenames: Filenames,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        file_format = type(self)._format(FileOpening(compression_type, buffer_size))
        super().__init__(_plan_reader(filenames, file_format, num_parallel_reads))


class TFRecordDataset(_RecordDataset):
    """The records of TFRecord files, as bytes.

    A damaged file raises `CorruptRecordError`, which names the file and the byte offset.

    Args:
        filenames: A file name, several of them, or a data set of them.
        compression_type: "GZIP", "ZLIB", or "" or None for no compression.
        buffer_size: How many bytes are read at a time; None for the default.
        num_parallel_reads: How many files are read in turns; None for one after the other.
    """

    _format = TFRecordFormat


class TextLineDataset(_RecordDataset):
    """The lines of text files, as bytes without line ends.

    Args:
        filenames: A file name, several of them, or a data set of them.
        compression_type: "GZIP", "ZLIB", or "" or None for no compression.
        buffer_size: How many bytes are read at a time; None for the default.
        num_parallel_reads: How many files are read in turns; None for one after the other.
    """

    _format = TextLineFormat


class FixedLengthRecordDataset(Dataset):
    """Records of one length, after a header and before a footer.

    Args:
        filenames: A file name, several of them, or a data set of them.
        record_bytes: The length of a record.
        header_bytes: How many bytes to skip at the start of a file.
        footer_bytes: How many bytes to leave out at its end.
        buffer_size: How many bytes are read at a time; None for the default.
        compression_type: "GZIP", "ZLIB", or "" or None for no compression.
        num_parallel_reads: How many files are read in turns; None for one after the other.
    """

    def __init__(
        self,
        filenames: Filenames,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        opening = FileOpening(compression_type, buffer_size)
        file_format = FixedLengthFormat(record_bytes, header_bytes or 0, footer_bytes or 0, opening)
        super().__init__(_plan_reader(filenames, file_format, num_parallel_reads))


class ParquetDataset(Dataset):
    """The rows of Parquet files, as dicts from column name to value (needs pyarrow).

    Args:
        filenames: A file name, several of them, or a data set of them.
        columns: The columns to read; None for all.
        num_parallel_reads: How many files are read in turns; None for one after the other.

    Raises:
        TypeError: `columns` is not a list of names.
    """

    def __init__(
        self,
        filenames: Filenames,
        columns: list[str] | tuple[str, ...] | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        if columns is not None and not isinstance(columns, (list, tuple)):
            raise TypeError(f"columns={columns!r} is not a list of names of columns.")
        file_format = ParquetFormat(None if columns is None else tuple(columns))
        super().__init__(_plan_reader(filenames, file_format, num_parallel_reads))


class ArrayRecordDataset(Dataset):
    """The records of ArrayRecord files, as bytes; a shuffle reads them in random order.

    Args:
        filenames: A file name, or several of them.
    """

    def __init__(self, filenames: check.Path | Iterable[check.Path]) -> None:
        names, spec = _parse_names(filenames), TensorSpec((), bytes)
        super().__init__(sources.RandomAccessFiles(names, "array_record", _open_records, spec))


def _open_records(filenames: tuple[str, ...]) -> Any:
    # The package comes with Grain; it is imported only by those who read such files.
    from array_record.python import array_record_data_source

    return array_record_data_source.ArrayRecordDataSource(list(filenames))

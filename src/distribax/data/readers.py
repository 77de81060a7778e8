"""Data sets that are read from files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distribax.data import arguments as check
from distribax.data.dataset import Dataset
from distribax.data.dataset_options import AUTOTUNE
from distribax.data.element_spec import TensorSpec
from distribax.data.formats.array_record import open_array_records
from distribax.data.formats.parquet import ParquetFormat
from distribax.data.formats.record_format import FileOpening, RecordFormat
from distribax.data.formats.text import FixedLengthFormat, TextLineFormat
from distribax.data.formats.tfrecord import TFRecordFormat
from distribax.data.plan import order, sources
from distribax.data.plan.plan_node import Node

_AUTOMATIC_READS = 4


def _reader_plan(filenames: Any, file_format: RecordFormat, num_parallel_reads: int | None) -> Node:
    reads = check.num_threads(num_parallel_reads, "num_parallel_reads")
    cycle = _AUTOMATIC_READS if reads == AUTOTUNE else reads or 1

    def read(names: tuple[str, ...]) -> Node:
        return sources.FileReader(names, file_format, cycle)

    if not isinstance(filenames, Dataset):
        return read(_names(filenames))
    # The names are a data set themselves: every one of them becomes a data set of records.
    return order.Interleave(filenames.plan, lambda name: Dataset(read(_names(name))), cycle)


def _names(filenames: Any) -> tuple[str, ...]:
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


class TFRecordDataset(Dataset):
    """The records of TFRecord files, as bytes.

    `num_parallel_reads` reads that many files in turns. A damaged file raises CorruptRecordError,
    which names the file and the byte offset.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        file_format = TFRecordFormat(FileOpening(compression_type, buffer_size))
        super().__init__(_reader_plan(filenames, file_format, num_parallel_reads))


class TextLineDataset(Dataset):
    """The lines of text files, as bytes without line ends."""

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        file_format = TextLineFormat(FileOpening(compression_type, buffer_size))
        super().__init__(_reader_plan(filenames, file_format, num_parallel_reads))


class FixedLengthRecordDataset(Dataset):
    """Records of `record_bytes` bytes each, after a header and before a footer."""

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        opening = FileOpening(compression_type, buffer_size)
        file_format = FixedLengthFormat(record_bytes, header_bytes or 0, footer_bytes or 0, opening)
        super().__init__(_reader_plan(filenames, file_format, num_parallel_reads))


class ParquetDataset(Dataset):
    """The rows of Parquet files, as dicts from column name to value (needs pyarrow)."""

    def __init__(
        self,
        filenames: Any,
        columns: list[str] | tuple[str, ...] | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        if columns is not None and not isinstance(columns, (list, tuple)):
            raise TypeError(f"columns={columns!r} is not a list of names of columns.")
        file_format = ParquetFormat(None if columns is None else tuple(columns))
        super().__init__(_reader_plan(filenames, file_format, num_parallel_reads))


class ArrayRecordDataset(Dataset):
    """The records of ArrayRecord files, as bytes; a shuffle reads them in random order."""

    def __init__(self, filenames: Any) -> None:
        opener: Callable[[tuple[str, ...]], Any] = open_array_records
        names = _names(filenames)
        super().__init__(
            sources.RandomAccessFiles(names, "array_record", opener, TensorSpec((), bytes))
        )

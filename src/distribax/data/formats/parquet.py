"""Parquet files: each row is a dict from column name to value (needs the package pyarrow)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from distribax.data.elements import Element, to_element
from distribax.data.formats.record_format import CorruptRecordError, RecordReader

if TYPE_CHECKING:
    import pyarrow

_DAMAGE = (OSError, ValueError)
"""What pyarrow raises for damaged files: its own errors derive from these."""


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            "reading Parquet files needs the package pyarrow. Install it with: pip install pyarrow"
        ) from error
    return parquet


@dataclass(frozen=True)
class ParquetFormat:
    """Rows of a Parquet file as dicts from column name to value."""

    columns: tuple[str, ...] | None = None
    name: str = "parquet"
    spec: None = None

    def open(self, filename: str, offset: list[int] | None = None) -> ParquetReader:
        """Opens a file at [row group, row in it]."""
        return ParquetReader(filename, self.columns, list(offset or (0, 0)))


class ParquetReader(RecordReader[list[int]]):
    """The rows of one open file, read one row group at a time."""

    _file: Any

    def __init__(self, filename: str, columns: tuple[str, ...] | None, offset: list[int]) -> None:
        self._filename = filename
        parquet = _import_parquet()
        try:
            file = parquet.ParquetFile(filename, page_checksum_verification=True)
        except FileNotFoundError:
            raise
        except _DAMAGE as error:
            raise CorruptRecordError(
                filename, 0, f"not a Parquet file, or damaged ({error})"
            ) from error
        known = file.schema_arrow.names
        unknown = sorted(set(columns or ()) - set(known))
        if unknown:
            file.close()
            raise ValueError(
                f"columns={list(columns or ())} names {unknown}, which {filename} does not have. "
                f"Its columns are {known}."
            )
        self._columns = list(columns) if columns is not None else None
        super().__init__(file, offset)

    @override
    def _read(self) -> Generator[Element, None, None]:
        first_group, first_row = self.offset
        for group in range(first_group, self._file.num_row_groups):
            table = self._read_group(group)
            # Converting whole columns is far cheaper than asking for every cell.
            columns = {name: _to_numpy(table.column(name)) for name in table.column_names}
            for row in range(first_row, table.num_rows):
                self.offset = [group, row + 1]
                yield {name: to_element(values[row]) for name, values in columns.items()}
            first_row = 0

    def _read_group(self, group: int) -> pyarrow.Table:
        try:
            return self._file.read_row_group(group, columns=self._columns)
        except _DAMAGE as error:
            place = self._file.metadata.row_group(group).column(0).data_page_offset
            raise CorruptRecordError(
                self._filename, place, f"damaged row group {group} ({error})"
            ) from error


def _to_numpy(column: pyarrow.ChunkedArray) -> Any:
    values = column.to_numpy()
    # Lists and text come as objects; their cells are converted one by one when they are used.
    return values if values.dtype != object else values.tolist()

"""Data sets that are read from CSV files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distribax.data import arguments as check
from distribax.data.dataset import Dataset
from distribax.data.formats.csv_text import CsvColumn, CsvDialect, CsvParser, infer_column
from distribax.data.formats.record_format import FileOpening
from distribax.data.plan import order, transforms
from distribax.data.readers import Filenames, TextLineDataset


class CsvDataset(Dataset):
    """The rows of CSV files, as tuples of values. A record is one line.

    Args:
        filenames: A file name, several of them, or a data set of them.
        record_defaults: For each column a value that replaces missing ones, such as `[0.0]`, or a
            type such as `np.float32`, if none may be missing.
        compression_type: "GZIP", "ZLIB", or "" or None for no compression.
        buffer_size: How many bytes are read at a time; None for the default.
        header: Whether the first line of each file is left out.
        field_delim: What stands between fields.
        use_quote_delim: Whether `"` encloses text that may contain the delimiter.
        na_value: What stands for a missing value, beside nothing.
        select_cols: The numbers of the columns to read, in ascending order; None for all.
        exclude_cols: The numbers of the columns to leave out, instead.

    Raises:
        ValueError: The columns do not fit each other.
    """

    def __init__(
        self,
        filenames: Filenames,
        record_defaults: Sequence[object],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,
        field_delim: str = ",",
        use_quote_delim: bool = True,
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
        exclude_cols: Sequence[int] | None = None,
    ) -> None:
        if select_cols is not None and exclude_cols is not None:
            raise ValueError("select_cols and exclude_cols were both given. Keep one.")
        columns = tuple(map(CsvColumn.parse, record_defaults))
        places = None if select_cols is None else tuple(select_cols)
        if exclude_cols is not None:
            others = (place for place in itertools.count() if place not in set(exclude_cols))
            places = tuple(itertools.islice(others, len(columns)))
        if places is not None and (
            len(places) != len(columns) or list(places) != sorted(set(places))
        ):
            raise ValueError(
                f"select_cols={list(places)} does not fit {len(columns)} record_defaults. Expected "
                "a number for each, in ascending order."
            )
        parser = CsvParser(columns, CsvDialect(field_delim, use_quote_delim, na_value), places)
        opening = FileOpening(compression_type, buffer_size)
        has_blanks = places is None and len(columns) == 1
        lines = _read_lines(filenames, header, opening, has_blanks)
        super().__init__(transforms.Map(lines.plan, parser, known_spec=parser.spec))


def _read_lines(
    filenames: Filenames, header: bool, opening: FileOpening, has_blanks: bool
) -> Dataset:
    """Returns the records; with `has_blanks` a blank line is one, whose only value is missing."""

    def open_files(names: check.Path | Sequence[check.Path]) -> Dataset:
        return TextLineDataset(names, opening.compression_type, opening.buffer_size)

    def keep(lines: Dataset) -> Dataset:
        return lines if has_blanks else lines.filter(lambda line: line != b"")

    def read(name: check.Path) -> Dataset:
        lines = open_files(name)
        return keep(lines.skip(1) if header else lines)

    if isinstance(filenames, Dataset):
        return Dataset(order.Interleave(filenames.plan, read, step="CsvDataset"))
    names = check.paths(filenames, "filenames")
    if not check.flag(header, "header"):
        return keep(open_files(names))
    return Dataset.from_tensor_slices(names).flat_map(read)


def make_csv_dataset(
    file_pattern: check.Path | Sequence[check.Path],
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[object] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[str | int] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
    encoding: str = "utf-8",
) -> Dataset:
    """Makes a data set of batches of the rows of CSV files, as dicts by column.

    Args:
        file_pattern: Glob patterns of the files.
        batch_size: How many rows make a batch.
        column_names: The names of all columns; None to read them from the first line.
        column_defaults: For each column that is read a default or a type, as for `CsvDataset`; None
            to infer the types from the first rows.
        label_name: The column that becomes the second part of a pair.
        select_columns: The columns to read, by name or number; None for all.
        field_delim: What stands between fields.
        use_quote_delim: Whether `"` encloses text that may contain the delimiter.
        na_value: What stands for a missing value, beside nothing.
        header: Whether the first line of each file has the names of the columns, which must be the
            same in all files unless `column_names` gives others.
        num_epochs: How often the rows are repeated; None for endlessly.
        shuffle: Whether the rows are shuffled.
        shuffle_buffer_size: How many rows the shuffle holds.
        shuffle_seed: The seed of the shuffle.
        prefetch_buffer_size: How many batches are made ahead of use; None for a good number.
        num_parallel_reads: Accepted; files are read one after the other.
        sloppy: Accepted; the order is always the same.
        num_rows_for_inference: How many rows tell the types; None for all.
        compression_type: "GZIP", "ZLIB", or "" or None for no compression.
        ignore_errors: Whether rows that cannot be read are left out.
        encoding: Accepted; files are UTF-8.

    Returns:
        The data set of dicts, or of pairs of a dict and the labels.

    Raises:
        ValueError: No file matches, a column does not exist, or the columns do not fit the files.
    """
    files = Dataset.list_files(file_pattern, shuffle=False)
    names = [name.decode() for name in files]
    dialect = CsvDialect(field_delim, use_quote_delim, na_value)
    opening = FileOpening(compression_type)
    if column_names is None and not check.flag(header, "header"):
        raise ValueError("header=False: nothing names the columns. Give column_names.")
    columns = list(_read_header(names, dialect, opening) if column_names is None else column_names)
    if len(set(columns)) != len(columns):
        raise ValueError(f"a name stands twice among the columns {columns}. Give column_names.")
    places = _find_places(columns, select_columns)
    chosen = [columns[place] for place in places]
    if label_name is not None and label_name not in chosen:
        raise ValueError(f"label_name={label_name!r} is not one of the columns {chosen}.")
    lines = _read_lines(names, header, opening, len(columns) == 1)
    if column_defaults is None:
        sample = lines if num_rows_for_inference is None else lines.take(num_rows_for_inference)
        table = [dialect.cut(line, len(columns)) for line in sample]
        kinds = [infer_column([row[place] for row in table], dialect) for place in places]
    else:
        kinds = [CsvColumn.parse(default) for default in column_defaults]
        if len(kinds) == len(columns):
            kinds = [kinds[place] for place in places]
        if len(kinds) != len(places):
            raise ValueError(
                f"column_defaults has {len(kinds)} defaults for the columns {chosen}. Expected one "
                "for each."
            )
    parser = CsvParser(tuple(kinds), dialect, None if select_columns is None else tuple(places))
    rows = Dataset(transforms.Map(lines.plan, parser, known_spec=parser.spec))
    rows = rows.ignore_errors() if ignore_errors else rows
    if shuffle:
        rows = rows.shuffle(shuffle_buffer_size, shuffle_seed)
    rows = rows.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
    named = rows.map(_name_columns(chosen, label_name))
    return named.prefetch(prefetch_buffer_size)


def _read_header(names: Sequence[str], dialect: CsvDialect, opening: FileOpening) -> Sequence[str]:
    """Returns the names of the columns, which are the same in all files."""
    first: list[str] = []
    for name in names:
        for line in _read_lines([name], False, opening, False).take(1):
            columns = dialect.cut(line)
            first = first or columns
            if columns != first:
                raise ValueError(
                    f"{name} has the columns {columns}, but {names[0]} has {first}. All files need "
                    "the same columns in the same order."
                )
            break
        else:
            raise ValueError(f"{name} is empty. Expected a line with the names of the columns.")
    return first


def _find_places(columns: Sequence[str], selected: Sequence[str | int] | None) -> list[int]:
    if selected is None:
        return list(range(len(columns)))
    places = set()
    for each in selected:
        if each not in (columns if isinstance(each, str) else range(len(columns))):
            raise ValueError(
                f"select_columns has {each!r}, which is not one of {list(columns)} or its number."
            )
        places.add(columns.index(each) if isinstance(each, str) else each)
    if len(places) != len(selected):
        raise ValueError(f"select_columns={list(selected)} has a column twice.")
    return sorted(places)


def _name_columns(columns: Sequence[str], label_name: str | None) -> Callable[..., Any]:
    def name(*values: np.ndarray[Any, Any]) -> Any:
        features = dict(zip(columns, values, strict=True))
        return features if label_name is None else (features, features.pop(label_name))

    return name

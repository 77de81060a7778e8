"""Rows of CSV text: fields, their types, and what stands for a missing value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distribax.data import arguments as check
from distribax.data.element_spec import TensorSpec
from distribax.data.elements import Leaf

_NUMBERS = (np.int32, np.int64, np.float32, np.float64)
# Text in another encoding than UTF-8 comes out as the bytes that went in.
_OTHER_BYTES = "surrogateescape"


@dataclass(frozen=True)
class CsvDialect:
    """How a line is cut into fields."""

    field_delim: str = ","
    use_quote_delim: bool = True
    na_value: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.field_delim, str) or len(self.field_delim) != 1:
            raise ValueError(f"field_delim={self.field_delim!r} is not a single character.")

    def cut(self, line: bytes, num_fields: int | None = None) -> list[str]:
        """Returns the fields of a line, of which there must be `num_fields` unless that is None."""
        text = line.decode(errors=_OTHER_BYTES)
        try:
            fields = (
                next(csv.reader([text], delimiter=self.field_delim)) or [""]
                if self.use_quote_delim
                else text.split(self.field_delim)
            )
        except csv.Error as error:
            raise ValueError(f"a record is not CSV: {error}: {line[:80]!r}.") from error
        if num_fields is not None and len(fields) != num_fields:
            raise _wrong_count(fields, num_fields, line)
        return fields


def _wrong_count(fields: Sequence[str], expected: int, line: bytes) -> ValueError:
    return ValueError(
        f"a record has {len(fields)} fields, but {expected} were expected: {line[:80]!r}."
    )


@dataclass(frozen=True)
class CsvColumn:
    """The type of a column and its value where a field is missing; None if none may be."""

    dtype: np.dtype[Any]
    default: Leaf | None = None

    @classmethod
    def parse(cls, given: object) -> CsvColumn:
        """Reads a user's default: a type, or a value, alone or in a list."""
        if isinstance(given, (type, np.dtype)):
            return cls(check.dtype(given, "record_defaults"))
        values = np.atleast_1d(np.asarray(given, object if _is_text(given) else None))
        dtype = np.dtype(object) if _is_text(given) else values.dtype
        if not hasattr(given, "dtype") and dtype in (np.int64, np.float64):
            # Python numbers carry no width: TensorFlow reads them as 32 bits.
            dtype = np.dtype(np.int32 if dtype == np.int64 else np.float32)
        if not values.size:
            return cls(dtype)
        if values.size > 1:
            raise ValueError(
                f"record_defaults has {given!r}. Expected one value for a column, or its type if "
                "each row must have one."
            )
        return cls(dtype, _convert(values[0], dtype))

    @property
    def spec(self) -> TensorSpec:
        """The spec of a field."""
        return TensorSpec((), bytes if self.dtype.hasobject else self.dtype)

    def read(self, field: str, place: int, dialect: CsvDialect) -> Leaf:
        """Returns the value of a field."""
        if field in ("", dialect.na_value):
            if self.default is None:
                raise ValueError(
                    f"field {place} is missing in a record, and its column has no default. Give "
                    "one in record_defaults instead of the type."
                )
            return self.default
        try:
            return _convert(field, self.dtype)
        except (ValueError, OverflowError):
            raise ValueError(
                f"field {place} has {field!r}, which is not a valid {self.dtype}."
            ) from None


def _is_text(given: object) -> bool:
    if isinstance(given, (list, tuple)):
        return any(map(_is_text, given))
    if isinstance(given, np.ndarray):
        return given.dtype.kind in "USO"
    return isinstance(given, (str, bytes))


def _convert(value: Any, dtype: np.dtype[Any]) -> Leaf:
    if dtype.hasobject:
        return value if isinstance(value, bytes) else str(value).encode(errors=_OTHER_BYTES)
    if isinstance(value, str) and "_" in value:
        raise ValueError  # Python reads 1_000 as a number, but in a file it is an identifier.
    if dtype.kind in "iu":
        number = int(value)
        if not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
            raise OverflowError
        return dtype.type(number)
    return dtype.type(value)


@dataclass(frozen=True)
class CsvParser:
    """Turns a line into a tuple of values."""

    columns: tuple[CsvColumn, ...]
    dialect: CsvDialect
    # Which fields of a line the columns are; None for all of them.
    places: tuple[int, ...] | None = None

    @property
    def spec(self) -> tuple[TensorSpec, ...]:
        """The specs of the values of a line."""
        return tuple(column.spec for column in self.columns)

    def __call__(self, line: bytes) -> tuple[Leaf, ...]:
        fields = self.dialect.cut(line, len(self.columns) if self.places is None else None)
        places = self.places if self.places is not None else range(len(self.columns))
        if max(places) >= len(fields):
            raise _wrong_count(fields, max(places) + 1, line)
        return tuple(
            column.read(fields[place], place, self.dialect)
            for column, place in zip(self.columns, places, strict=True)
        )


def infer_column(fields: Sequence[str], dialect: CsvDialect) -> CsvColumn:
    """Returns the narrowest type that holds some fields; missing ones become 0 or empty text."""
    given = [field for field in fields if field not in ("", dialect.na_value)]
    for kind in _NUMBERS:
        dtype = np.dtype(kind)
        try:
            values = [_convert(field, dtype) for field in given]
        except (ValueError, OverflowError):
            continue
        # A number too large for the type has become infinite.
        named = ["inf" in field.lower() or "nan" in field.lower() for field in given]
        if given and all(np.isfinite(v) or n for v, n in zip(values, named, strict=True)):
            return CsvColumn(dtype, np.zeros((), dtype)[()])
    return CsvColumn(np.dtype(object), b"")

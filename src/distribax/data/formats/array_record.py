"""ArrayRecord files: records that can be read in any order."""

from __future__ import annotations

from typing import Any


def open_array_records(filenames: tuple[str, ...]) -> Any:
    """Opens files of the ArrayRecord format as one indexable source of bytes."""
    # The package comes with Grain; it is imported only by those who read such files.
    from array_record.python import array_record_data_source

    return array_record_data_source.ArrayRecordDataSource(list(filenames))

"""Data sets written to a directory: files of elements, and a catalogue that is written last."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from distribax.data import elements
from distribax.data.element_spec import Spec
from distribax.data.formats import element_codec
from distribax.data.formats.record_format import FileOpening
from distribax.data.formats.tfrecord import TFRecordReader, TFRecordWriter

_CATALOGUE = "catalogue.json"
_VERSION = 1


@dataclass(frozen=True)
class Catalogue:
    """What a directory holds: the files in order, and what their elements are."""

    filenames: tuple[str, ...]
    spec: Spec
    compression: str | None
    # How many elements each file has; older catalogues do not say.
    counts: dict[str, int] | None
    # Whether the elements are batches; None if only they can tell.
    is_batched: bool | None


def has_catalogue(path: str) -> bool:
    """Tells whether a complete data set was saved in a directory."""
    return os.path.exists(os.path.join(path, _CATALOGUE))


def read_catalogue(path: str) -> Catalogue:
    """Returns what a directory holds."""
    if not has_catalogue(path):
        raise FileNotFoundError(
            f"path={path!r} has no saved data set. Expected a directory that dataset.save(path) "
            "has written."
        )
    try:
        with open(os.path.join(path, _CATALOGUE)) as file:
            saved = json.load(file)
        version, compression = saved.get("version"), saved.get("compression")
        FileOpening(compression)  # Checks it.
        if version == _VERSION:
            names = [os.path.join(path, os.path.basename(name)) for name in saved["files"]]
            counts = saved.get("counts")
            if counts is not None:
                counts = dict(zip(names, map(int, counts), strict=True))
            spec = element_codec.load_spec(saved["spec"])
            batched = saved.get("is_batched", False)
            return Catalogue(tuple(names), spec, compression, counts, batched)
    except element_codec.MALFORMED as error:
        raise ValueError(
            f"path={path!r}: {_CATALOGUE} is damaged: {type(error).__name__}: {error}. Save the "
            "data set again."
        ) from error
    raise ValueError(
        f"path={path!r} was saved in the format {version!r}, this version reads {_VERSION}."
    )


@dataclass(frozen=True)
class SavedFormat:
    """The elements of one file of a saved data set."""

    spec: Any
    compression: str | None = None
    name: str = "saved"

    def open(self, filename: str, offset: int | None = None) -> _ElementReader:
        """Opens a file at the byte where an element begins."""
        return _ElementReader(filename, FileOpening(self.compression), offset or 0)


class _ElementReader(TFRecordReader):
    @override
    def __next__(self) -> elements.Element:
        offset, record = self.offset, super().__next__()
        try:
            return element_codec.decode(record)
        except ValueError as error:
            raise self._make_error(offset, f"the record is not an element ({error})") from error


class SavedWriter:
    """Writes a data set to a directory; what was there before stays until the end.

    Args:
        path: The directory.
        compression: "GZIP", or None.
        shard_func: Returns the number of an element's file; None for one file.
    """

    def __init__(
        self, path: str, compression: str | None, shard_func: Callable[..., Any] | None
    ) -> None:
        FileOpening(compression)  # Checks it.
        self._path = path
        self._compression = compression
        self._shard_func = shard_func
        self._token = secrets.token_hex(4)
        self._writers: dict[int, TFRecordWriter] = {}
        self._counts: Counter[int] = Counter()
        self._is_finished = False
        os.makedirs(path, exist_ok=True)

    def _name(self, shard: int) -> str:
        return f"{shard:05d}-{self._token}.elements"

    def add(self, element: elements.Element) -> None:
        """Appends an element."""
        shard = 0
        if self._shard_func is not None:
            shard = int(np.asarray(elements.call_with_element(self._shard_func, element)))
        if shard not in self._writers:
            name = os.path.join(self._path, self._name(shard))
            self._writers[shard] = TFRecordWriter(name, self._compression)
        self._writers[shard].write(element_codec.encode(element))
        self._counts[shard] += 1

    def finish(self, spec: Spec, is_batched: bool | None) -> None:
        """Makes what was added the content of the directory."""
        for writer in self._writers.values():
            writer.close()
        before = read_catalogue(self._path).filenames if has_catalogue(self._path) else ()
        catalogue = {
            "version": _VERSION,
            "files": [self._name(shard) for shard in sorted(self._writers)],
            "counts": [self._counts[shard] for shard in sorted(self._writers)],
            "spec": element_codec.save_spec(spec),
            "is_batched": is_batched,
            "compression": self._compression,
        }
        partial = os.path.join(self._path, f"{_CATALOGUE}.{self._token}")
        with open(partial, "w") as file:
            json.dump(catalogue, file)
        os.replace(partial, os.path.join(self._path, _CATALOGUE))
        self._is_finished = True
        _remove(before)

    def discard(self) -> None:
        """Removes what was added, unless it is finished."""
        if self._is_finished:
            return
        for writer in self._writers.values():
            writer.close()
        _remove([os.path.join(self._path, self._name(shard)) for shard in self._writers])
        self._writers = {}


def _remove(filenames: Any) -> None:
    for name in filenames:
        with contextlib.suppress(FileNotFoundError):
            os.remove(name)

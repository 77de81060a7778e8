"""Files with all that a server keeps: written whole or not at all, checked when they are read.

A file is a fixed prefix (magic, length and checksum of the header), a JSON header, and the bytes of
the arrays, each with its own checksum in the header. It is written under another name, flushed to
the disk and then renamed, so that whatever ends the process leaves the last good file in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from distribax.errors import DistribaxError
from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import plain_dtype
from distribax.topology.host_memory import aligned_empty

KEPT: Final = 2
"""How many files are kept: the newest, and one more should it be damaged."""

_MAGIC: Final = b"dxsnap1\n"
_PREFIX: Final = struct.Struct("<8sQI")
_SUFFIX: Final = ".dxsnap"


class DamagedSnapshotError(DistribaxError, ValueError):
    """A snapshot that cannot be read."""


@dataclass(frozen=True)
class SnapshotState:
    """What a snapshot holds: JSON values, and arrays."""

    header: dict[str, Any]
    arrays: Sequence[Array] = field(default=())


def write(folder: Path, number: int, state: SnapshotState) -> Path:
    """Writes a snapshot, removes those that are too old, and returns the new one's path.

    `number` orders the snapshots of a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [np.asarray(array, order="C") for array in state.arrays]
    described = [[a.dtype.name, a.shape, zlib.crc32(_view_bytes(a))] for a in arrays]
    header = json.dumps({"state": state.header, "arrays": described}).encode()
    path = folder / f"{number:020d}{_SUFFIX}"
    temporary = path.with_suffix(".partial")
    try:
        with open(temporary, "wb") as file:
            file.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)))
            file.write(header)
            for array in arrays:
                file.write(_view_bytes(array))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    for old in _list_files(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    # Left by a process that was killed while it wrote.
    for left in folder.glob("*.partial"):
        left.unlink(missing_ok=True)
    return path


def read_newest(folder: Path) -> tuple[Path | None, SnapshotState | None, list[str]]:
    """Reads the newest snapshot that is whole; also says which ones are not, and why."""
    damaged: list[str] = []
    for path in _list_files(folder):
        try:
            return path, read(path), damaged
        except (OSError, DamagedSnapshotError) as error:
            damaged.append(f"{path}: {error}")
    return None, None, damaged


def read(path: Path) -> SnapshotState:
    """Reads a snapshot; a DamagedSnapshotError if it is not whole."""
    with open(path, "rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
            raise DamagedSnapshotError("not a snapshot")
        _, size, checksum = _PREFIX.unpack(prefix)
        if size > os.fstat(file.fileno()).st_size:
            raise DamagedSnapshotError("its end is missing")
        text = file.read(size)
        if zlib.crc32(text) != checksum:
            raise DamagedSnapshotError("its header is damaged")
        header = json.loads(text)
        arrays: list[Array] = []
        for dtype, shape, expected in header["arrays"]:
            array = aligned_empty(tuple(shape), plain_dtype(dtype))
            # The count is checked too: new memory may hold the right bytes by chance.
            whole = file.readinto(_view_bytes(array)) == array.nbytes
            if not whole or zlib.crc32(_view_bytes(array)) != expected:
                raise DamagedSnapshotError(f"array {len(arrays)} is damaged")
            arrays.append(array)
    return SnapshotState(header["state"], arrays)


def _list_files(folder: Path) -> list[Path]:
    """Returns the snapshots, the newest first."""
    return sorted(folder.glob(f"*{_SUFFIX}"), reverse=True)


def _view_bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _sync_folder(folder: Path) -> None:
    # Without it the new name could be lost with the machine's power; not all systems allow it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

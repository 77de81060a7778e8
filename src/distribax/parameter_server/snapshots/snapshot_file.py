"""Files with all that a server keeps: written whole or not at all, checked when they are read.

A file is a fixed prefix (magic, length and authentication code of the header), a JSON header, and
the bytes of the arrays, each with its SHA-256 in the header. The code is an HMAC under the
cluster's token: nothing in a file is parsed, let alone unpickled, before it is known that a server
of this cluster has written it. The folder is the owner's alone. A file is written under another
name, flushed to the disk and then renamed, so that whatever ends the process leaves the last good
file in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from distribax.errors import DistribaxError
from distribax.parameter_server.protocol.operations import Array
from distribax.parameter_server.protocol.parameter_spec import plain_dtype
from distribax.parameter_server.protocol.wire import view_bytes
from distribax.topology.host_memory import make_aligned

KEPT: Final = 2
"""How many files are kept: the newest, and one more should it be damaged."""

_MAGIC: Final = b"dxsnap2\n"
_PREFIX: Final = struct.Struct("<8sQ32s")
_SUFFIX: Final = ".dxsnap"
_ASIDE: Final = ".damaged"
_PRIVATE_FOLDER: Final = 0o700
_PRIVATE_FILE: Final = 0o600


class DamagedSnapshotError(DistribaxError, ValueError):
    """A snapshot that cannot be read."""


@dataclass(frozen=True)
class SnapshotState:
    """What a snapshot holds: JSON values, and arrays."""

    header: dict[str, Any]
    arrays: Sequence[Array] = field(default=())


def write(folder: Path, number: int, state: SnapshotState, token: bytes) -> Path:
    """Writes a snapshot, removes those that are too old, and returns the new one's path.

    Args:
        folder: Where; it is created if need be, and nobody else may read it then.
        number: Orders the snapshots of a folder.
        state: What to write.
        token: The cluster's secret.

    Raises:
        PermissionError: The folder belongs to another user.
    """
    make_private(folder)
    arrays = [np.asarray(array, order="C") for array in state.arrays]
    described = [[a.dtype.name, a.shape, _digest(a)] for a in arrays]
    header = json.dumps({"state": state.header, "arrays": described}).encode()
    path = folder / f"{number:020d}{_SUFFIX}"
    temporary = path.with_suffix(".partial")
    try:
        with open(temporary, "wb", opener=_open_private) as file:
            file.write(_PREFIX.pack(_MAGIC, len(header), _make_code(token, path, header)))
            file.write(header)
            for array in arrays:
                file.write(view_bytes(array))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    for suffix in (_SUFFIX, _ASIDE):
        for old in _list_files(folder, suffix)[KEPT:]:
            old.unlink(missing_ok=True)
    # Left by a process that was killed while it wrote.
    for left in folder.glob("*.partial"):
        left.unlink(missing_ok=True)
    return path


def list_files(folder: Path) -> list[Path]:
    """Returns the snapshots of a folder, the newest first; none if it is another user's."""
    try:
        _check_owner(folder)
    except OSError:
        return []
    return _list_files(folder, _SUFFIX)


def set_aside(path: Path) -> None:
    """Renames a snapshot that cannot be used, so that no server ever tries it again."""
    with contextlib.suppress(OSError):
        os.replace(path, path.with_suffix(_ASIDE))


def read(path: Path, token: bytes) -> SnapshotState:
    """Reads a snapshot.

    Args:
        path: The file.
        token: The cluster's secret.

    Raises:
        DamagedSnapshotError: It is not whole, or was not written with this token.
    """
    with open(path, "rb", opener=open_no_link) as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
            raise DamagedSnapshotError("not a snapshot")
        _, size, code = _PREFIX.unpack(prefix)
        if size > os.fstat(file.fileno()).st_size:
            raise DamagedSnapshotError("its end is missing")
        text = file.read(size)
        if not hmac.compare_digest(code, _make_code(token, path, text)):
            raise DamagedSnapshotError(
                "its header is damaged, or it was not written by a server of this cluster"
            )
        header = json.loads(text)
        arrays: list[Array] = []
        for dtype, shape, expected in header["arrays"]:
            array = make_aligned(tuple(shape), plain_dtype(dtype))
            # The count is checked too: new memory may hold the right bytes by chance.
            whole = file.readinto(view_bytes(array)) == array.nbytes
            if not whole or _digest(array) != expected:
                raise DamagedSnapshotError(f"array {len(arrays)} is damaged")
            arrays.append(array)
    return SnapshotState(header["state"], arrays)


def _make_code(token: bytes, path: Path, header: bytes) -> bytes:
    # With its name: an old snapshot must not pass for a newer one.
    return hmac.digest(token, b"snapshot " + path.name.encode() + b"\n" + header, hashlib.sha256)


def _digest(array: Array) -> str:
    return hashlib.sha256(view_bytes(array)).hexdigest()


def _list_files(folder: Path, suffix: str) -> list[Path]:
    """Returns the files of a kind, the newest first."""
    return sorted(folder.glob(f"*{suffix}"), reverse=True)


def make_private(folder: Path) -> None:
    """Creates a folder, and those above it that are missing, for this user alone."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
    if _check_owner(folder) != _PRIVATE_FOLDER:
        folder.chmod(_PRIVATE_FOLDER)


def _check_owner(folder: Path) -> int:
    """Returns the permissions of a folder; raises a PermissionError if it is another user's."""
    found = os.stat(folder)
    # A link of another user may lead to any folder of this one.
    for user in (found.st_uid, os.lstat(folder).st_uid):
        if user != os.geteuid():
            raise PermissionError(
                f"{folder} belongs to user {user}, and this server runs as {os.geteuid()}. "
                "Give snapshot_dir a folder of its own."
            )
    return stat.S_IMODE(found.st_mode)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, _PRIVATE_FILE)


def open_no_link(path: str, flags: int) -> int:
    """Opens a file for reading; never what a link leads to, and without waiting for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _sync_folder(folder: Path) -> None:
    # Without it the new name could be lost with the machine's power; not all systems allow it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

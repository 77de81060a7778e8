"""A checkpoint as a directory: written by Orbax aside, and named when it is complete."""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distribax.errors import DamagedCheckpointError

_MARKER = "_CHECKPOINT_METADATA"
_VARIABLES = "variables"
_NOTES = "notes"
_ASIDE = re.compile(r"\.(?P<name>.+)\.(part|old|gone)-(?P<token>[0-9a-f]{8})(\..*)?")
_NOTHING = {"": np.zeros(())}
_VERSIONS = (1, 2)
"""The formats that can be read; the last is written. The first has no checksums."""


def write(
    target: Path, values: Mapping[str, np.ndarray], notes: Mapping[str, Any], overwrite: bool
) -> None:
    """Writes a checkpoint from this process alone; an error leaves everything as it was."""
    for name, value in values.items():
        if not value.size:
            raise ValueError(
                f"Checkpoint.save: the value {name!r} has shape {value.shape}. Orbax cannot store "
                "arrays without elements: leave it out of the checkpoint."
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    part = target.with_name(f".{target.name}.part-{token}")
    # Imported on use: Orbax would make `import distribax` much slower.
    from distribax.training.checkpoints import orbax_files

    try:
        orbax_files.save(
            part, (_VARIABLES, dict(values) or _NOTHING), (_NOTES, _seal(notes, values))
        )
        _publish(part, target, target.with_name(f".{target.name}.old-{token}"), overwrite)
    except BaseException:
        # Orbax may have made a directory whose name begins with the one it was given.
        for left in target.parent.iterdir():
            if left.name.startswith(part.name):
                shutil.rmtree(left, ignore_errors=True)
        raise


def _publish(part: Path, target: Path, old: Path, overwrite: bool) -> None:
    if not overwrite or not target.exists():
        os.rename(part, target)
        return
    # A kill between these two leaves no `target`: readers then find the new one, `part`.
    os.rename(target, old)
    try:
        os.rename(part, target)
    except OSError:
        os.rename(old, target)
        raise
    remove(old)


def remove(path: Path) -> None:
    """Removes a checkpoint; a kill in the middle leaves nothing that looks like one."""
    match = _ASIDE.fullmatch(path.name)
    name = path.name if match is None else match["name"]
    gone = path.with_name(f".{name}.gone-{secrets.token_hex(4)}")
    os.rename(path, gone)
    shutil.rmtree(gone)


def read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values and the notes of a checkpoint, checked against their checksums."""
    place = _locate(source)
    if place is None:
        raise ValueError(
            f"Checkpoint.restore: path={str(source)!r} is not a checkpoint: there is no such "
            "directory, or it is not complete. Pass what save() returned."
        )
    notes = _read_notes(place)
    if notes is None:
        raise _make_error(source, "its notes cannot be read, or have another checksum")
    if notes.get("version") not in _VERSIONS:
        raise ValueError(
            f"Checkpoint.restore: path={str(source)!r} has format version "
            f"{notes.get('version')!r}, but this version of distribax reads {_VERSIONS}. Use the "
            "one it was saved with."
        )
    from distribax.training.checkpoints import orbax_files

    try:
        values = orbax_files.restore_arrays(place, _VARIABLES)
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # What Orbax raises depends on what is damaged.
        raise _make_error(source, f"{type(error).__name__}: {error}") from error
    values.pop("", None)
    checksums = notes.get("checksums", dict.fromkeys(values))
    if checksums.keys() != values.keys():
        differing = sorted(checksums.keys() ^ values.keys())
        raise _make_error(source, f"the values {differing} were not saved, or are missing")
    for name, value in values.items():
        if checksums[name] is not None and checksums[name] != _compute_checksum(value):
            raise _make_error(source, f"the value {name!r} has another checksum")
    return values, notes


def _make_error(source: Path, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Checkpoint.restore: {source} is damaged: {problem}. Restore the checkpoint before it; "
        "dx.CheckpointManager.restore_or_initialize() does so."
    )


def _seal(notes: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns notes with checksums of all values, and of the notes themselves."""
    checksums = {name: _compute_checksum(value) for name, value in values.items()}
    sealed = {**notes, "version": _VERSIONS[-1], "checksums": checksums}
    return sealed | {"checksum": checksum_notes(sealed)}


def _compute_checksum(value: Any) -> str:
    array = np.ascontiguousarray(value)
    data = array.reshape(-1).view(np.uint8)
    return f"{array.dtype.name} {list(np.shape(value))} {_crc32c(data):08x}"


def checksum_notes(notes: Mapping[str, Any]) -> str:
    """Returns the checksum of notes, which is one of them."""
    text = json.dumps({key: notes[key] for key in notes if key != "checksum"}, sort_keys=True)
    return f"{_crc32c(text.encode()):08x}"


def _read_notes(place: Path) -> dict[str, Any] | None:
    """Returns the notes of a checkpoint, or None if they are damaged."""
    try:
        notes = json.loads((place / _NOTES / "metadata").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(notes, dict):
        return None
    # Those of the first version have no checksums.
    is_whole = notes.get("version") == 1 or notes.get("checksum") == checksum_notes(notes)
    return notes if is_whole else None


def is_complete(path: Path) -> bool:
    """Tells whether there is a whole checkpoint at `path`."""
    return _locate(path) is not None


def _locate(path: Path) -> Path | None:
    """Returns where the checkpoint at `path` is: there, or beside it.

    It is beside it if a writer that replaced it was killed in the middle; the new one if that is
    there, or else the old one.
    """
    if (path / _MARKER).is_file():
        return path
    for old in path.parent.glob(f".{glob.escape(path.name)}.old-*"):
        new = old.with_name(old.name.replace(".old-", ".part-"))
        for place in (new, old):
            if (place / _MARKER).is_file():
                return place
    return None


def find_names(directory: Path) -> set[str]:
    """Returns the names of what may be checkpoints in a directory, of those that are beside too."""
    matches = [(path.name, _ASIDE.fullmatch(path.name)) for path in directory.iterdir()]
    return {name if match is None else match["name"] for name, match in matches}


def get_order(path: Path) -> int:
    """Returns the place of a checkpoint among those of its directory; copying it changes nothing.

    Not a time: clocks are changed, and differ between machines.
    """
    place = _locate(path)
    notes = None if place is None else _read_notes(place)
    order = -1 if notes is None else notes.get("order", 0)
    # Damaged: whoever reads it says so; here it comes before those that are whole.
    return order if isinstance(order, int) else -1


def find_last_order(directory: Path) -> int:
    """Returns the highest place of a checkpoint in a directory; 0 if there is none."""
    if not directory.is_dir():
        return 0
    paths = [directory / name for name in find_names(directory)]
    return max(map(get_order, filter(is_complete, paths)), default=0)


def read_shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the values of a checkpoint."""
    return {name: tuple(np.shape(value)) for name, value in read(source)[0].items()}


def remove_leftovers(directory: Path, name_begins: str) -> None:
    """Removes what writers that were killed have left in `directory`; ends what they have begun."""
    for path in sorted(directory.iterdir()):
        match = _ASIDE.fullmatch(path.name)
        if match is None or not match["name"].startswith(name_begins):
            continue
        target = directory / match["name"]
        place = _locate(target)
        if place is not None and place != target:
            os.rename(place, target)
        shutil.rmtree(path, ignore_errors=True)


def _crc32c(data: bytes | np.ndarray) -> int:
    # Imported on use, as Orbax is.
    import google_crc32c

    return int(google_crc32c.value(data))

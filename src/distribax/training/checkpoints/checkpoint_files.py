"""A checkpoint as a directory: written by Orbax aside, and named when it is complete."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

_MARKER = "_CHECKPOINT_METADATA"
_NOTES = "notes"
_ASIDE = re.compile(r"\.(?P<name>.+)\.(part|old)-[0-9a-f]{8}(\..*)?")
_NOTHING = {"": np.zeros(())}


def write(
    target: Path, values: Mapping[str, np.ndarray], notes: Mapping[str, Any], overwrite: bool
) -> None:
    """Writes a checkpoint from this process alone; an error leaves everything as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    part = target.with_name(f".{target.name}.part-{token}")
    ocp = _orbax()
    try:
        with _make_checkpointer(ocp) as checkpointer:
            checkpointer.save(
                part,
                args=ocp.args.Composite(
                    variables=ocp.args.StandardSave(dict(values) or _NOTHING),
                    notes=ocp.args.JsonSave(dict(notes)),
                ),
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
    # Only a kill between these two lines would leave no `target`; both are then beside it, whole.
    os.rename(target, old)
    try:
        os.rename(part, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values and the notes of a checkpoint."""
    if not is_complete(source):
        raise ValueError(
            f"Checkpoint.restore: path={str(source)!r} is not a checkpoint: there is no such "
            "directory, or it is not complete. Pass what save() returned."
        )
    ocp = _orbax()
    with _make_checkpointer(ocp) as checkpointer:
        found = checkpointer.restore(
            source,
            args=ocp.args.Composite(
                variables=ocp.args.StandardRestore(), notes=ocp.args.JsonRestore()
            ),
        )
    values = dict(found["variables"])
    values.pop("", None)
    return values, dict(found["notes"])


def is_complete(path: Path) -> bool:
    """Tells whether there is a whole checkpoint at `path`."""
    return (path / _MARKER).is_file()


def get_order(path: Path) -> int:
    """Returns the place of a checkpoint among those of its directory; copying it changes nothing.

    Not a time: clocks are changed, and differ between machines.
    """
    try:
        order = json.loads((path / _NOTES / "metadata").read_text()).get("order", 0)
    except (OSError, ValueError, AttributeError, RecursionError):
        return -1  # Damaged: whoever reads it says so; here it comes before those that are whole.
    return order if isinstance(order, int) else -1


def find_last_order(directory: Path) -> int:
    """Returns the highest place of a checkpoint in a directory; 0 if there is none."""
    if not directory.is_dir():
        return 0
    return max(map(get_order, filter(is_complete, directory.iterdir())), default=0)


def read_shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the values of a checkpoint."""
    return {name: tuple(np.shape(value)) for name, value in read(source)[0].items()}


def remove_leftovers(directory: Path, name_begins: str) -> None:
    """Removes what writers that were killed have left in `directory`."""
    for path in directory.iterdir():
        match = _ASIDE.fullmatch(path.name)
        if match is not None and match["name"].startswith(name_begins):
            shutil.rmtree(path, ignore_errors=True)


def _make_checkpointer(ocp: ModuleType) -> Any:
    """Returns a checkpointer of this process alone: others are waited for elsewhere, with a bound.

    Without this Orbax would wait for all processes of `jax.distributed`.
    """
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"distribax_{process}",
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _orbax() -> ModuleType:
    # Imported on use: it would make `import distribax` a good deal slower.
    import orbax.checkpoint as ocp

    return ocp

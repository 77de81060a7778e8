"""What parameter servers need of Ray: its programs, and a folder for its sockets."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distribax.cli.findings import Finding

_PROGRAMS: Final = ("core/src/ray/gcs/gcs_server", "core/src/ray/raylet/raylet")
_LONGEST_FOLDER: Final = 40
"""Ray appends the path of a socket, and the whole has at most 107 bytes."""


def check_ray() -> Iterator[Finding]:
    """Yields whether Ray can start here; nothing if it is not installed."""
    spec = importlib.util.find_spec("ray")
    if spec is None or not spec.submodule_search_locations:
        return
    package = Path(next(iter(spec.submodule_search_locations)))
    missing = [name for name in _PROGRAMS if not os.access(package / name, os.X_OK)]
    if missing:
        value = f"cannot run {', '.join(missing)} in {package}"
        fix = "pip install --force-reinstall 'distribax[ray]'; the folder must not be noexec"
        yield Finding("ray", "programs", value, fix, is_problem=True)
    else:
        yield Finding("ray", "programs", "can be run")
    yield _check_folder(tempfile.gettempdir())
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("ray", "RAY_ADDRESS", f"{address}; distribax starts nodes of its own")


def _check_folder(folder: str) -> Finding:
    if not os.access(folder, os.W_OK):
        value, fix = f"{folder} cannot be written", "set TMPDIR to a folder that can be"
        return Finding("ray", "socket folder", value, fix, is_problem=True)
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        value = f"{folder} is long, and the path of a socket has at most 107 bytes"
        return Finding("ray", "socket folder", value, "export TMPDIR=/tmp")
    return Finding("ray", "socket folder", folder)

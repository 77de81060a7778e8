"""The libraries that distribax is measured against, each in a virtual environment of its own.

So their pinned versions never conflict with those of JAX. An environment that exists with the same
requirements is left as it is. A library that this interpreter has is used from there, if it has no
environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

FOLDER_VARIABLE = "DISTRIBAX_BENCH_PEERS"
"""Names the folder of the environments; by default it is in the user's cache folder."""

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "tensorflow": ("tensorflow-cpu==2.21.0",),
    "torch": ("torch==2.13.0", "numpy"),
}
ADDITIONS: dict[str, tuple[str, ...]] = {
    # Keras 2, whose `fit` knows parameter servers. It would ask for another build of TensorFlow.
    "tensorflow": ("tf_keras==2.21.0",),
}
"""What is installed in addition to the requirements, without what it asks for itself."""

_INSTALL_SECONDS = 1800
_STAMP = "requirements.txt"


def find_folder() -> Path:
    """The folder of the environments."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(cache) / "distribax" / "peers")


def find_python(peer: str) -> Path | None:
    """The Python interpreter that has the peer, or None if there is none."""
    folder = find_folder() / peer
    # Written last, so that an interrupted installation does not count as made.
    if (folder / _STAMP).exists():
        return folder / "bin" / "python"
    return Path(sys.executable) if importlib.util.find_spec(peer) else None


def is_made(peer: str) -> bool:
    """Tells whether the environment of `peer` exists, with today's requirements."""
    stamp = find_folder() / peer / _STAMP
    return stamp.exists() and stamp.read_text() == _join_requirements(peer)


def _join_requirements(peer: str) -> str:
    return "\n".join((*REQUIREMENTS[peer], *ADDITIONS.get(peer, ()))) + "\n"


def make(peer: str) -> Path:
    """Make the environment of `peer` and return its Python interpreter."""
    if peer not in REQUIREMENTS:
        raise ValueError(f"unknown peer {peer!r}: expected one of {sorted(REQUIREMENTS)}")
    folder = find_folder() / peer
    interpreter = folder / "bin" / "python"
    if is_made(peer):
        return interpreter
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=True)
    _install(interpreter, *REQUIREMENTS[peer])
    if peer in ADDITIONS:
        _install(interpreter, "--no-deps", *ADDITIONS[peer])
    (folder / _STAMP).write_text(_join_requirements(peer))
    return interpreter


def _install(interpreter: Path, *arguments: str) -> None:
    command = [str(interpreter), "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, check=True, timeout=_INSTALL_SECONDS)

"""Makes the virtual environments of the libraries that distribax is measured against.

Each peer gets an environment of its own, so that its pins never meet those of JAX::

    python benchmarks/peers.py              # all of them
    python benchmarks/peers.py tensorflow   # one

An environment that is already there with the same requirements is left as it is.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parent / ".venvs"

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "tensorflow": ("tensorflow-cpu==2.21.0",),
    "torch": ("torch==2.13.0", "numpy"),
}

_INSTALL_SECONDS = 1800
_STAMP = "requirements.txt"


def python_of(peer: str) -> Path | None:
    """The peer's Python interpreter, or None while its environment has not been made."""
    folder = ENVIRONMENTS / peer
    # Written last, so that an interrupted installation does not count as made.
    if not (folder / _STAMP).exists():
        return None
    return folder / "bin" / "python"


def make(peer: str) -> Path:
    """Make the environment of `peer` and return its Python interpreter."""
    if peer not in REQUIREMENTS:
        raise ValueError(f"unknown peer {peer!r}: expected one of {sorted(REQUIREMENTS)}")
    folder = ENVIRONMENTS / peer
    wanted = "\n".join(REQUIREMENTS[peer]) + "\n"
    stamp = folder / _STAMP
    interpreter = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return interpreter
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=True)
    subprocess.run(
        [str(interpreter), "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]],
        check=True,
        timeout=_INSTALL_SECONDS,
    )
    stamp.write_text(wanted)
    return interpreter


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("peers", nargs="*", help=f"which ones: {', '.join(REQUIREMENTS)}")
    options = parser.parse_args(arguments)
    for peer in options.peers or REQUIREMENTS:
        try:
            interpreter = make(peer)
        except ValueError as error:
            parser.error(str(error))
        print(f"{peer}: {interpreter.relative_to(ENVIRONMENTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

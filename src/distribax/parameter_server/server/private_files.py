"""Folders and files that are this user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_PRIVATE_FOLDER: Final = 0o700
_PRIVATE_FILE: Final = 0o600


def make_private(folder: Path) -> None:
    """Creates a folder, and those above it that are missing, for this user alone."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
    if check_owner(folder) != _PRIVATE_FOLDER:
        folder.chmod(_PRIVATE_FOLDER)


def check_owner(folder: Path) -> int:
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


def open_private(path: str, flags: int) -> int:
    """Opens a file for this user alone; never what a link leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, _PRIVATE_FILE)


def open_no_link(path: str, flags: int) -> int:
    """Opens a file for reading; never what a link leads to, and without waiting for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

"""Snapshots of parameter servers that never came back: nobody else could remove them in time.

The folder of a task's snapshots is removed when the coordinator ends the training. A server that is
away then, and is not started again, leaves it behind. Whoever starts the next node on the machine
removes it, once no server has used it for a week.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Final

from distribax.cluster.environment_variables import read_seconds

FOLDER_PREFIX: Final = "distribax-"
DIGEST_SIZE: Final = 12
"""How many bytes, written as hexadecimal digits, the rest of a folder's name stands for."""
_KEEP_SECONDS: Final = read_seconds("DISTRIBAX_SNAPSHOT_KEEP_SECONDS", 7 * 24 * 3600.0)
"""How long a folder is kept that no server uses. One that is used is touched every hour."""


def remove_left_snapshots(parent: Path) -> list[Path]:
    """Removes the snapshots of this user's servers that ended long ago.

    Args:
        parent: Where the folders of all tasks are.

    Returns:
        The folders that were removed.
    """
    removed: list[Path] = []
    for folder in parent.glob(FOLDER_PREFIX + "[0-9a-f]" * (2 * DIGEST_SIZE)):
        # Others may change it meanwhile.
        with contextlib.suppress(OSError):
            is_own = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
            if is_own and time.time() - _find_last_use(folder) > _KEEP_SECONDS:
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def _find_last_use(folder: Path) -> float:
    """Returns when something in a folder was last changed, in seconds of `time.time()`."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))

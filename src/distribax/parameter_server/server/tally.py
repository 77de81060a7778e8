"""How many changes of each kind a server has made, in a file that outlives its process.

A server that is killed loses what came after its newest snapshot. The next process finds here how
much that was. The file is mapped into memory: to count costs no system call, and what was counted
is there whatever ends the process. It is lost with the machine's power, like the newest changes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from distribax.parameter_server.server.private_files import open_no_link

OPTIMIZER_UPDATE: Final = "optimizer update"
"""The kind of change that an optimizer makes."""

_NAME: Final = "tally"
_SLOT: Final = struct.Struct("<32sQQ")
"""A kind, how many changes of it were made, and how many were lost."""
_MAX_KINDS: Final = 32
_SIZE: Final = _SLOT.size * _MAX_KINDS


class Tally:
    """Counts the changes of a server by kind, "assign_add" for example.

    Attributes:
        counts: How many were made, those that a restored snapshot holds included.
        lost: How many were made and lost, by all processes that were this server.
        is_kept: Whether a file keeps this; without, what was lost is not known.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.is_kept = False
        self._places: dict[str, int] = {}
        self._memory: mmap.mmap | None = None

    def add(self, changes: Mapping[str, int]) -> None:
        """Counts changes that were made.

        Args:
            changes: How many there are of each kind.
        """
        for kind, count in changes.items():
            self.counts[kind] += count
            self._write(kind)

    def keep_in(self, folder: Path) -> None:
        """Counts in a file of a folder from now on; what an earlier one counted more is lost.

        Without space for the file, nothing is kept.

        Args:
            folder: The server's own folder, which must exist.
        """
        if self._memory is not None:
            return
        path = folder / _NAME
        made, lost = _read(path)
        self.lost = lost + (made - self.counts)
        with contextlib.suppress(OSError):
            self._memory = _create(path)
            self.is_kept = True
            for kind in {*self.counts, *self.lost}:
                self._write(kind)

    def close(self) -> None:
        """Counts in memory only from now on."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _write(self, kind: str) -> None:
        place = self._places.setdefault(kind, len(self._places))
        if self._memory is not None and place < _MAX_KINDS:
            counts = self.counts[kind], self.lost[kind]
            _SLOT.pack_into(self._memory, place * _SLOT.size, kind.encode(), *counts)


def _create(path: Path) -> mmap.mmap:
    # Another file than before: a process that was given up may still count in that one.
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Without space on the disk, a write to the memory would end the process.
        os.posix_fallocate(descriptor, 0, _SIZE)
        memory = mmap.mmap(descriptor, _SIZE)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return memory


def _read(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Returns what a file counts as made and as lost; nothing if it is not whole."""
    try:
        with open(path, "rb", opener=open_no_link) as file:
            data = file.read(_SIZE + 1)
        rows = [
            (kind.rstrip(b"\0").decode(), made, lost)
            for kind, made, lost in _SLOT.iter_unpack(data)
        ]
    except (OSError, ValueError, struct.error):
        rows = []
    named = [row for row in rows[:_MAX_KINDS] if row[0]]
    made = Counter({kind: count for kind, count, _ in named})
    return made, Counter({kind: count for kind, _, count in named})

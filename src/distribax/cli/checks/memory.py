"""Shared memory, and how many files a process may open."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distribax.cli.findings import Finding
from distribax.parameter_server.shared_memory.arena import can_share

_SHARED_FOLDER: Final = Path("/dev/shm")
_ENOUGH_BYTES: Final = 256 << 20
"""Containers often have 64 MiB; Ray and Grain keep arrays there."""
_ENOUGH_FILES: Final = 1024


def check_memory() -> Iterator[Finding]:
    """Yields whether processes can share memory, and whether there are enough file handles."""
    yield _check_sharing()
    if _SHARED_FOLDER.is_dir():
        yield _check_folder(_SHARED_FOLDER)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} per process"
    fix = f"ulimit -n {min(hard, 65536) if hard >= 0 else 65536} before you start the program"
    yield Finding("memory", "open files", value, fix if 0 <= soft < _ENOUGH_FILES else "")


def _check_sharing() -> Finding:
    fix = (
        "none is needed for programs without parameter servers; with them, values are sent over "
        "TCP: use Linux on x86_64 to share them, and allow memfd_create in the sandbox"
    )
    if not can_share():
        value = "parameter servers cannot share memory with workers on this platform"
        return Finding("memory", "shared memory", value, fix)
    try:
        descriptor = os.memfd_create("distribax-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
                memory[0] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        value = f"cannot be created: {error}"
        return Finding("memory", "shared memory", value, fix)
    return Finding("memory", "shared memory", "can be created and written")


def _check_folder(folder: Path) -> Finding:
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    value = f"{free / 2**20:,.0f} MiB free"
    fix = "docker run --shm-size=1g, or mount a larger tmpfs there"
    return Finding("memory", str(folder), value, fix if free < _ENOUGH_BYTES else "")

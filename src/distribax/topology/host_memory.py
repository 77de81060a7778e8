"""Host memory: arrays that JAX can use without a copy, and a heap that keeps what was freed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ALIGNMENT: Final = 64
"""JAX takes an array on the CPU as it is, without a copy, if it begins at such an address."""
LARGE_BYTES: Final = 64 << 10
"""To copy fewer bytes once more takes less time than to align them."""

_STREAMED_BYTES: Final = 1 << 20
"""Copies from this size on go past the caches, where `stream_large_copies` has seen to it."""
_LARGEST_CACHED: Final = 16 << 20
"""Of what is larger, too little would still be in the caches when it is used."""
_TUNABLES_VARIABLE: Final = "GLIBC_TUNABLES"

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_THRESHOLD: Final = 1 << 30


def make_aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array; a large one begins at an address that JAX takes as it is."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE_BYTES or dtype.hasobject:
        return np.empty(shape, dtype)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    return view_array(raw, -find_address(raw) % ALIGNMENT, shape, dtype)


def view_array(
    memory: np.ndarray[Any, Any], offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> np.ndarray[Any, Any]:
    """Returns the array that begins at a byte of some memory, as a view of it."""
    # One call, where a slice, a view and a reshape would be three.
    return np.ndarray(shape, dtype, memory, offset)


def copy_aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy that JAX can use as it is, if it is large enough for that to matter."""
    copy = make_aligned(array.shape, array.dtype)
    if not array.flags.c_contiguous or not _STREAMED_BYTES <= array.nbytes <= _LARGEST_CACHED:
        np.copyto(copy, array)
        return copy
    # In pieces, so that it is in the caches: this process uses it next.
    source, target = array.reshape(-1), copy.reshape(-1)
    step = max(1, _STREAMED_BYTES // 2 // array.itemsize)
    for start in range(0, len(source), step):
        np.copyto(target[start : start + step], source[start : start + step])
    return copy


def find_address(array: np.ndarray[Any, Any]) -> int:
    """Returns where an array begins; faster than `array.ctypes.data`."""
    start: int = array.__array_interface__["data"][0]
    return start


def keep_freed_memory() -> bool:
    """Makes this process keep large buffers that it frees, and returns whether it could.

    By default glibc gives a large buffer back to the kernel as soon as it is freed, and each page
    of the next one costs a page fault. A worker that allocates the same megabytes in each step
    spends a good part of it there. The process' memory stays at its peak in exchange.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # Not glibc, or not even a Unix.
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    settings = (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    return all(bool(mallopt(setting, _LARGEST_THRESHOLD)) for setting in settings)


def stream_large_copies(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that is to write large copies past the caches.

    They are for processes that hand arrays to others through shared memory. Where another process
    has read before, a write through the caches takes several times as long, because each line has
    to be taken away from the other core first. By default glibc writes past the caches only what
    is larger than most of the processor's caches together, which may be hundreds of megabytes. It
    reads the variable when a process starts; other C libraries do not know it.

    Args:
        inherited: The variables that the process would have; settings for glibc are kept.
    """
    ours = f"glibc.cpu.x86_non_temporal_threshold={_STREAMED_BYTES}"
    # What comes later counts.
    theirs = inherited.get(_TUNABLES_VARIABLE)
    return {_TUNABLES_VARIABLE: f"{ours}:{theirs}" if theirs else ours}

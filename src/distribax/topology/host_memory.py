"""Host memory: arrays that JAX can use without a copy, and a heap that keeps what was freed."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ALIGNMENT: Final = 64
"""JAX takes an array on the CPU as it is, without a copy, if it begins at such an address."""
LARGE_BYTES: Final = 64 << 10
"""To copy fewer bytes once more takes less time than to align them."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_THRESHOLD: Final = 1 << 30


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array; a large one begins at an address that JAX takes as it is."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE_BYTES or dtype.hasobject:
        return np.empty(shape, dtype)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    return view_array(raw, -address(raw) % ALIGNMENT, shape, dtype)


def view_array(
    memory: np.ndarray[Any, Any], offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> np.ndarray[Any, Any]:
    """Returns the array that begins at a byte of some memory, as a view of it."""
    # One call, where a slice, a view and a reshape would be three.
    return np.ndarray(shape, dtype, memory, offset)


def aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy that JAX can use as it is, if it is large enough for that to matter."""
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def address(array: np.ndarray[Any, Any]) -> int:
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

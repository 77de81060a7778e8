"""Memory on the host that JAX can use."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from distribax.topology.host_memory import copy_aligned, keep_freed_memory, make_aligned


def test_aligned_arrays_have_any_form() -> None:
    for shape, dtype in [((1 << 20,), "bfloat16"), ((300, 300), "float32"), ((4096, 3), "int64")]:
        value = make_aligned(shape, dtype)
        assert value.shape == shape and value.dtype == dtype and value.ctypes.data % 64 == 0
    assert make_aligned((), "bfloat16").shape == ()
    assert make_aligned((3, 0), "bool").shape == (3, 0)
    assert make_aligned((1 << 16,), object)[0] is None


def test_jax_takes_aligned_copies_as_they_are() -> None:
    copy = copy_aligned(np.ones((300, 300), np.float32))
    assert jax.device_put(copy).unsafe_buffer_pointer() == copy.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "V1000001"])
def test_large_copies_are_whole(dtype: str) -> None:
    value = make_aligned((3, (2 << 20) // np.dtype(dtype).itemsize + 1), dtype)
    value.view(np.uint8)[...] = np.arange(value.nbytes).reshape(3, -1) % 251
    for array in (value, value[1], value[:, ::-1], np.asfortranarray(value)):
        copy = copy_aligned(array)
        assert copy.shape == array.shape and copy.dtype == array.dtype
        assert copy.tobytes() == array.tobytes()


def test_freed_memory_is_kept_where_the_system_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep_freed_memory()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()

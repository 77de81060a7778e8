"""The way of results and exceptions from a worker to the coordinator."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import traceback
from typing import Any

import cloudpickle
import jax
import numpy as np

from distribax.coordinator.messages import Packed, Raised
from distribax.errors import OutOfRangeError, RemoteError

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


# On the worker.


def pack(value: Any) -> Any:
    """Returns a value as something that any process can unpickle; arrays become NumPy's."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, jax.Array):
        return _to_numpy(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return value if value.dtype.kind != "O" else Packed(_dumps(value))
    if kind is tuple or kind is list:
        return kind(pack(item) for item in value)
    if kind is dict and all(type(key) in _PLAIN for key in value):
        return {key: pack(item) for key, item in value.items()}
    return Packed(_dumps(value))


def _to_numpy(value: jax.Array) -> Any:
    return np.asarray(value)[()] if _fits_numpy(value) else Packed(_dumps(value))


def _fits_numpy(value: jax.Array) -> bool:
    """Tells whether NumPy can hold an array; it has nothing for the keys of random numbers."""
    return isinstance(value.dtype, np.dtype)


class _Pickler(cloudpickle.Pickler):
    """Pickles objects with JAX arrays inside as if they held NumPy arrays.

    The keys of random numbers stay what they are. Classes that came from the coordinator go back
    by name: unpickled there as cloudpickle does it, their methods would be replaced by copies.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and _named(obj.__module__, obj.__qualname__) is not obj:
            return _class_of, (obj.__module__, obj.__qualname__, _dumped_class(obj))
        if not isinstance(obj, jax.Array):
            return super().reducer_override(obj)
        if _fits_numpy(obj):
            return np.array, (np.asarray(obj),)
        data = np.asarray(jax.random.key_data(obj))
        return _random_key, (data, jax.random.key_impl(obj))


def _named(module: str, qualname: str) -> Any:
    """Returns what a name stands for in this process, or None."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


@functools.cache
def _dumped_class(kind: type) -> bytes:
    return cloudpickle.dumps(kind, 5)


def _class_of(module: str, qualname: str, data: bytes) -> Any:
    found = _named(module, qualname)
    return found if isinstance(found, type) else pickle.loads(data)


def _random_key(data: Any, impl: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=impl)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(value)
    return buffer.getvalue()


def pack_error(error: BaseException) -> Raised:
    """Returns an exception as something that any process can unpickle."""
    lines = "".join(traceback.format_exception(error))
    if isinstance(error, StopIteration) and not isinstance(error, OutOfRangeError):
        # The end of any iterator is the end of the sequence.
        error = OutOfRangeError(*error.args)
    summary = "".join(traceback.format_exception_only(error)).strip()
    data = None
    # What ends a process ends the worker's function only.
    if isinstance(error, Exception):
        try:
            data = _dumps(error)
            pickle.loads(data)
        except Exception:
            data = None  # It cannot be taken apart and put together again.
    return Raised(data, summary, lines)


# On the coordinator.


def unpack(outcome: Any) -> Any:
    """Returns the value that `pack` made something of."""
    kind = type(outcome)
    if kind is Packed:
        return pickle.loads(outcome.data)
    if kind is tuple or kind is list:
        return kind(unpack(item) for item in outcome)
    if kind is dict:
        return {key: unpack(item) for key, item in outcome.items()}
    return outcome


def unpack_error(raised: Raised, function: str, worker_index: int) -> BaseException:
    """Returns the exception, of its own type if that is possible, with the worker's traceback."""
    error: BaseException | None = None
    if raised.data is not None:
        try:
            error = pickle.loads(raised.data)
        except Exception:
            error = None  # Its class cannot be imported here.
    if error is None:
        error = RemoteError(raised.summary)
    error.add_note(
        f"Raised by {function} on worker {worker_index}, whose traceback is:\n{raised.traceback}"
    )
    return error

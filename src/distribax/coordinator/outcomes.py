"""How results and exceptions travel from a worker to the coordinator."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax.coordinator.pickling import PLAIN_TYPES
from distribax.errors import OutOfRangeError, ParameterServerUnreachableError, RemoteError


class Packed(NamedTuple):
    """A value that is pickled apart, as it is not a plain one."""

    data: bytes


class Raised(NamedTuple):
    """An exception of the user's function: pickled if that is possible, and in words."""

    data: bytes | None
    summary: str
    traceback: str


@dataclass(frozen=True)
class ClosureFailure:
    """What a closure ended with instead of a value."""

    error: BaseException


# On the worker.


def pack_result(value: object) -> object:
    """Returns a function's result as something that any process can unpickle.

    Arrays become NumPy arrays.
    """
    try:
        return _pack(value)
    except Exception as error:
        error.add_note(
            f"The function has returned {type(value).__name__} {value!r:.200}, which cannot be "
            "pickled. Return arrays, numbers and nests of them."
        )
        raise


def _pack(value: object) -> object:
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, jax.Array) and _fits_numpy(value):
        return np.asarray(value)[()]
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value if value.dtype.kind != "O" else Packed(_dumps(value))
    if type(value) is tuple:
        return tuple(_pack(item) for item in value)
    if type(value) is list:
        return [_pack(item) for item in value]
    if type(value) is dict and all(type(key) in PLAIN_TYPES for key in value):
        return {key: _pack(item) for key, item in value.items()}
    return Packed(_dumps(value))


def _fits_numpy(value: jax.Array) -> bool:
    """Tells whether NumPy can hold an array; it has no data type for random keys."""
    return isinstance(value.dtype, np.dtype)


class _ResultPickler(cloudpickle.Pickler):
    """Pickles objects with JAX arrays inside as if they held NumPy arrays.

    Random keys stay random keys. Classes that came from the coordinator go back by name: unpickled
    there as cloudpickle does it, their methods would be replaced by copies.
    """

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and _find(obj.__module__, obj.__qualname__) is not obj:
            return _load_class, (obj.__module__, obj.__qualname__, _dump_class(obj))
        if not isinstance(obj, jax.Array):
            return super().reducer_override(obj)
        if _fits_numpy(obj):
            return np.array, (np.asarray(obj),)
        data = np.asarray(jax.random.key_data(obj))
        return _make_random_key, (data, jax.random.key_impl(obj))


def _find(module: str, qualname: str) -> object:
    """Returns what a name stands for in this process, or None."""
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


@functools.cache
def _dump_class(kind: type) -> bytes:
    return cloudpickle.dumps(kind, 5)


def _load_class(module: str, qualname: str, data: bytes) -> object:
    found = _find(module, qualname)
    return found if isinstance(found, type) else pickle.loads(data)


def _make_random_key(data: np.ndarray, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer, 5).dump(value)
    return buffer.getvalue()


def pack_error(error: BaseException) -> Raised:
    """Returns an exception as something that any process can unpickle."""
    lines = "".join(traceback.format_exception(error))
    if isinstance(error, StopIteration) and not isinstance(error, OutOfRangeError):
        # The end of any iterator is the end of the sequence.
        error = OutOfRangeError(*error.args)
    summary = "".join(traceback.format_exception_only(error)).strip()
    data = None
    # KeyboardInterrupt and SystemExit end the function only: the coordinator is told in words.
    if isinstance(error, Exception):
        try:
            data = _dumps(error)
            pickle.loads(data)
        except Exception:
            data = None  # It cannot be pickled, or not unpickled.
    return Raised(data, summary, lines)


def find_unreachable(error: BaseException | None) -> ParameterServerUnreachableError | None:
    """Returns the exception, or its cause, that says that a server is out of reach, if any."""
    while error is not None:
        if isinstance(error, ParameterServerUnreachableError):
            return error
        error = error.__cause__
    return None


# On the coordinator.


def is_unreachable(raised: Raised) -> bool:
    """Tells whether a worker's exception says that a parameter server is out of reach."""
    return type(_load_error(raised)) is ParameterServerUnreachableError


_WRAPPED: Final = frozenset({Packed, Raised, tuple, list, dict})
"""The types of outcomes that are not the result itself."""


def unpack_outcome(outcome: object, function: str, worker_index: int) -> object:
    """Returns the result of a function that a worker has run, or a `ClosureFailure`."""
    if type(outcome) not in _WRAPPED:
        return outcome
    if type(outcome) is Raised:
        return ClosureFailure(_unpack_error(outcome, function, worker_index))
    try:
        return _unpack(outcome)
    except Exception as error:
        error.add_note(
            f"{function} has returned a value on worker {worker_index} that cannot be unpickled "
            "here. Return arrays, numbers and nests of them."
        )
        return ClosureFailure(error)


def _unpack(outcome: object) -> object:
    """Returns the value that `_pack` was given."""
    if type(outcome) is Packed:
        return pickle.loads(outcome.data)
    if type(outcome) is tuple:
        return tuple(_unpack(item) for item in outcome)
    if type(outcome) is list:
        return [_unpack(item) for item in outcome]
    if type(outcome) is dict:
        return {key: _unpack(item) for key, item in outcome.items()}
    return outcome


def _unpack_error(raised: Raised, function: str, worker_index: int) -> BaseException:
    """Returns the exception, of its own type if possible, with the worker's traceback as a note."""
    error = _load_error(raised) or RemoteError(raised.summary)
    error.add_note(
        f"Raised by {function} on worker {worker_index}, whose traceback is:\n{raised.traceback}"
    )
    return error


def _load_error(raised: Raised) -> BaseException | None:
    if raised.data is not None:
        try:
            error: BaseException = pickle.loads(raised.data)
            return error
        except Exception:
            pass  # Its class cannot be imported here.
    return None

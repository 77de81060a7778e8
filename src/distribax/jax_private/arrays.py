"""Arrays: buffers and devices, arrays of random keys, and classes that JAX takes as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array as _array
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import tree_util as _tree_util
from jax._src.interpreters import pxla
from jax.sharding import Sharding
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from distribax.jax_private.tracing import is_tracer

_Class = TypeVar("_Class")
_Result = TypeVar("_Result")

flatten_with_none: Callable[
    [object, Callable[[object], bool] | None], tuple[list[Any], PyTreeDef]
] = _tree_util.none_leaf_registry.flatten
"""Returns the leaves and the structure of a nest, in which None is a leaf."""


def is_concrete_array(value: object) -> TypeGuard[jax.Array]:
    """Tells whether `value` is an ordinary array: no tracer, and no array of random keys."""
    return type(value) is _array.ArrayImpl


def is_local(array: object) -> bool:
    """Tells whether all of an array is on devices of this process (a tracer counts as local)."""
    return is_tracer(array) or not isinstance(array, jax.Array) or array.is_fully_addressable


def is_key(value: object) -> bool:
    """Tells whether `value` is an array of random keys."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def apply_to_key_data(fn: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """Applies `fn`, which moves arrays, to the numbers that an array of random keys consists of."""
    keys: Any = key  # The class's module is not the same in all versions of JAX.
    return type(keys)(keys._impl, fn(keys._base_array))


def refuse_deleted(array: jax.Array) -> None:
    """Raises if the memory of an array belongs to a program that it was donated to.

    JAX ends the process if such an array of several devices enters another program.

    Raises:
        RuntimeError: It was donated.
    """
    if array.is_deleted():
        raise RuntimeError(
            f"An array {array.aval.str_short()} has no value any more: it was donated "
            "(donate_argnums) to an earlier call, which has overwritten it. Use what that call has "
            "returned. What v.value() returns may be the memory of the variable itself: donate a "
            "copy, jnp.copy(v)."
        )


def split_by_device(array: jax.Array) -> list[jax.Array]:
    """Returns the single-device arrays of `array` on this process, in the order of its devices.

    Raises:
        RuntimeError: It was donated.
    """
    if is_key(array):
        keys: Any = array
        return [type(keys)(keys._impl, piece) for piece in split_by_device(keys._base_array)]
    refuse_deleted(array)
    return list(array._arrays)  # type: ignore[attr-defined]


def join_by_device(
    shape: tuple[int, ...], sharding: Sharding, pieces: Sequence[jax.Array]
) -> jax.Array:
    """Returns single-device arrays as one array of `shape`, as `split_by_device` expects."""
    if is_key(pieces[0]):
        keys: list[Any] = list(pieces)
        inner = [key._base_array for key in keys]
        whole = (*shape, *inner[0].shape[len(pieces[0].shape) :])
        return type(keys[0])(keys[0]._impl, join_by_device(whole, sharding, inner))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces))


def pick_copy(array: jax.Array) -> jax.Array:
    """Returns one device's copy of a replicated array."""
    return array if len(array.sharding.device_set) == 1 else split_by_device(array)[0]


def uncommit(array: jax.Array) -> jax.Array:
    """Returns the same buffer as an array that may be mixed with arrays of other devices."""
    if is_tracer(array) or not array.committed or len(array.sharding.device_set) > 1:
        return array
    if is_key(array):
        return apply_to_key_data(uncommit, array)
    return _array.ArrayImpl(array.aval, array.sharding, [array], committed=False)  # type: ignore[list-item]


def copy_array(array: jax.Array) -> jax.Array:
    """Returns a copy in memory of its own, without compiling a program for it where JAX can."""
    if array.committed and array.is_fully_addressable and not is_key(array):
        return jax.device_put(array, array.sharding, may_alias=False)
    return jnp.copy(array)


def rewrap(array: jax.Array) -> jax.Array:
    """Returns the same buffers as a new array object; uncommitted if it is on one device."""
    if is_key(array):
        return apply_to_key_data(rewrap, array)
    pieces = split_by_device(array)
    return _array.ArrayImpl(array.aval, array.sharding, pieces, committed=len(pieces) > 1)  # type: ignore[arg-type]


def add_methods(array: jax.Array, methods: Sequence[Callable[..., Any]]) -> jax.Array:
    """Returns an array object of its own that has some methods more, by their names."""
    own = rewrap(array)
    for method in methods:
        setattr(own, method.__name__, method)
    return own


def move_to_device(value: Any, device: jax.Device) -> Any:
    """Returns the whole of an array on one device, without a copy if it is there already.

    What is no array of JAX, or is traced and so on no device, is returned as it is.
    """
    if not isinstance(value, jax.Array) or is_tracer(value):
        return value
    array = value
    if is_key(array):
        return apply_to_key_data(lambda data: move_to_device(data, device), array)
    if array.sharding.is_fully_replicated:
        near = {piece.device: piece for piece in split_by_device(array)}
        array = near.get(device, next(iter(near.values())))
    return array if array.devices() == {device} else jax.device_put(uncommit(array), device)


def call_near(fn: Callable[[jax.Array], _Result], value: ArrayLike) -> _Result:
    """Returns `fn(value)`, computed on the device that the value is on."""
    if not isinstance(value, jax.Array) or is_tracer(value):
        return fn(jnp.asarray(value))
    with jax.default_device(next(iter(value.devices()))):
        return fn(value)


def add_dim(value: ArrayLike) -> jax.Array:
    """Returns `value` with a first dimension of size 1, on the device it is on."""
    return call_near(lambda array: array[None], value)


@functools.lru_cache(maxsize=256)
def _make_aval(shape: tuple[int, ...], dtype: np.dtype) -> _core.ShapedArray:
    return _core.ShapedArray(shape, dtype)


def put_rows(leaf: object, sharding: Sharding, devices: Sequence[jax.Device]) -> jax.Array:
    """Puts a host array on devices, an equal part of its rows on each.

    It does what `jax.device_put` does, in a fifth of the time: batches are small, so the time that
    Python takes for each is time that the training loop waits.
    """
    if not isinstance(leaf, np.ndarray) or jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return jax.device_put(leaf, sharding)
    rows = leaf.shape[0] // len(devices)
    parts = [leaf[index * rows : (index + 1) * rows] for index in range(len(devices))]
    aval = _make_aval(leaf.shape, leaf.dtype)
    array: jax.Array = pxla.batched_device_put(aval, sharding, parts, devices)
    return array


def register_array_type(
    cls: type[_Class], read: Callable[[_Class], jax.Array], describe: Callable[[_Class], Any]
) -> None:
    """Lets JAX take objects of a class, and of classes derived from it, as arrays.

    They stay leaves of nests, as arrays are: `jax.tree.map` hands them to its function as they are.

    Args:
        cls: The class.
        read: Returns the array that an object stands for; called when JAX computes with it.
        describe: Returns the type of that array (`jax.typeof`), if possible without reading it.
    """
    _core.pytype_aval_mappings[cls] = describe
    _dtypes.register_canonicalize_value_handler(cls, read)

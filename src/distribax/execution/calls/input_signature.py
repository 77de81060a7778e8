"""Input signatures: what the arguments of a compiled function must be like."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from distribax.values import DistributedValues, Global, is_host_value, is_none_or_opaque, is_wrapped


@runtime_checkable
class ArraySpec(Protocol):
    """A shape, of which some dimensions may be None, and a data type: a `dx.data.TensorSpec`."""

    @property
    def shape(self) -> tuple[int | None, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@runtime_checkable
class ReplicaSpecs(Protocol):
    """A spec for each replica: what the `element_spec` of a distributed data set has."""

    @property
    def specs(self) -> Sequence[ArraySpec]: ...


def is_spec(leaf: object) -> TypeGuard[ArraySpec | ReplicaSpecs]:
    """Tells whether `leaf` describes an array, and is none."""
    if is_wrapped(leaf) or isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return False
    return isinstance(leaf, (ArraySpec, ReplicaSpecs))


def fit(
    fn: Callable[..., object],
    signature: Sequence[object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[Any, ...]:
    """Returns arguments as a signature wants them: numbers and lists become arrays.

    Args:
        fn: The function.
        signature: A nest of specs for each argument.
        args: The positional arguments.
        kwargs: The keyword arguments, each of which must be one that the signature describes.

    Raises:
        TypeError: The arguments do not fit.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    if kwargs:
        bound = inspect.signature(fn).bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(
                f"{name}: input_signature describes positional arguments, but {list(bound.kwargs)} "
                "can be given by name only. Leave input_signature out."
            )
        args = bound.args
    if len(args) != len(signature):
        raise TypeError(
            f"{name}: input_signature has {len(signature)} argument(s), but {len(args)} were given."
        )
    return tuple(
        _fit_nest(f"{name}: argument {index}", spec, arg)
        for index, (spec, arg) in enumerate(zip(signature, args, strict=True))
    )


def _fit_nest(what: str, spec: object, value: object) -> Any:
    specs, tree = jax.tree.flatten(spec, is_leaf=is_spec)
    given: Any
    if len(specs) == 1 and specs[0] is spec:
        return _fit_leaf(what, spec, value)
    leaves, given = jax.tree.flatten(
        value, is_leaf=lambda leaf: is_none_or_opaque(leaf) or is_wrapped(leaf)
    )
    if given != tree:
        raise TypeError(f"{what} has the structure {given}, but input_signature has {tree}.")
    return jax.tree.unflatten(
        tree, [_fit_leaf(what, *pair) for pair in zip(specs, leaves, strict=True)]
    )


def _fit_leaf(what: str, spec: object, value: object) -> Any:
    if is_wrapped(value):
        for each, shape, dtype in _describe_pieces(spec, value):
            _check(what, each, shape, dtype, len(shape) > 0)
        return value
    if not isinstance(spec, ArraySpec):
        raise TypeError(
            f"{what} is {value!r}, but input_signature has {spec!r}: a distributed value."
        )
    if not isinstance(value, jax.Array):
        if not (is_host_value(value) or isinstance(value, (list, tuple))):
            raise TypeError(f"{what} is {value!r}, but input_signature has {spec!r}: an array.")
        # NumPy arrays keep their data types; numbers and lists have none of their own.
        value = (
            value if isinstance(value, (np.ndarray, np.generic)) else np.asarray(value, spec.dtype)
        )
    _check(what, spec, tuple(np.shape(value)), value.dtype, False)
    return value


def _describe_pieces(
    spec: object, value: DistributedValues
) -> list[tuple[ArraySpec, tuple[int, ...], np.dtype[Any]]]:
    """Returns the spec, shape and data type of each replica's part."""
    layout = value.layout
    if isinstance(layout, Global) and not layout.mirrored and not layout.stacked:
        array, count = layout.array, layout.mesh.size
        shapes = [(array.shape[0] // count, *array.shape[1:])]
        dtypes = [array.dtype]
    else:
        shapes = [tuple(np.shape(piece)) for piece in value.values]
        dtypes = [jnp.result_type(piece) for piece in value.values]
    specs = list(spec.specs) if isinstance(spec, ReplicaSpecs) else [spec] * len(shapes)
    return list(zip(specs, shapes, dtypes, strict=False))  # type: ignore[arg-type]


def _check(
    what: str,
    spec: ArraySpec,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    is_batch: bool,
) -> None:
    wanted = tuple(spec.shape)
    # The last pieces of a data set are smaller than the others.
    start = 1 if is_batch else 0
    fits = len(wanted) == len(shape) and all(
        size is None or size == given
        for size, given in zip(wanted[start:], shape[start:], strict=True)
    )
    if not fits or jax.dtypes.canonicalize_dtype(dtype) != jax.dtypes.canonicalize_dtype(
        spec.dtype
    ):
        raise TypeError(
            f"{what} has shape {shape} and data type {np.dtype(dtype).name}, but input_signature "
            f"has shape {wanted} and data type {np.dtype(spec.dtype).name}."
        )


def make_example(what: str, spec: object) -> Any:
    """Returns an array of zeros for a spec.

    Args:
        what: The argument, for messages.
        spec: The spec.

    Raises:
        ValueError: A dimension is not known.
    """
    if not isinstance(spec, ArraySpec) or None in spec.shape:
        raise ValueError(
            f"{what}={spec!r} does not tell all sizes, and JAX compiles for sizes. Give a spec "
            "without None, or an example of the argument."
        )
    return np.zeros([size or 0 for size in spec.shape], spec.dtype)

"""`get_variable`: variables by name, made on the first request."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax.contrib.distribute import variable_store
from distribax.contrib.distribute.variable_store import Initializer, NamedVariable, Reuse
from distribax.types import VariableAggregation, VariableSynchronization
from distribax.variables import Variable


def get_variable(
    name: str,
    shape: int | Sequence[int] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    initializer: Initializer | None = None,
    *,
    trainable: bool | None = None,
    reuse: Reuse | None = None,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
) -> Variable:
    """Returns the variable of that name, which the current strategy places when it is new.

    In a tower all towers get one variable, with a copy for each. A name is asked for twice only
    where the scope, or `reuse`, allows it. A tower function that runs again is not asking twice:
    it finds the variables that it has made.

    Args:
        name: The name, below the scopes' prefix.
        shape: The shape; not needed for a variable that exists or starts from a value.
        dtype: The data type; float32, or that of the initial value, by default.
        initializer: An initial value; a function of (shape, dtype) such as `jnp.zeros`; one of
            JAX's (key, shape, dtype); or, with no shape given, one without arguments. By default
            uniform around 0 by Glorot's rule for floats, and zeros for integers and bools. What
            is random depends on the name alone, so that every run starts the same.
        trainable: Whether optimizers should change it.
        reuse: True if the variable exists, False if it does not, `AUTO_REUSE` for either; as the
            scope says by default.
        synchronization: When the copies are brought together, see `dx.Variable`.
        aggregation: How the towers' values are combined, see `dx.Variable`.

    Returns:
        The variable; a new one starts with the initializer's value.

    Raises:
        ValueError: The name exists and may not be reused, does not exist and should, or what exists
            has another shape or data type.

    Example:
        >>> from distribax.contrib import distribute
        >>> distribution = distribute.OneDeviceStrategy("CPU:0")
        >>> with distribution.scope():
        ...     b = distribute.get_variable("b", initializer=[1.0, 2.0])
        >>> b.name, b.shape
        ('b:0', (2,))
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"get_variable: name={name!r} is not a name. Expected a string: 'w'.")
    scope = variable_store.get_variable_scope()
    full_name = scope.full_name(name)
    given = variable_store.check_reuse(reuse, "get_variable")
    mode = scope.reuse if given is None else given
    wanted = None if shape is None else _check_shape(shape, full_name)
    entries = variable_store.get_current_store().entries
    found = entries.get(full_name)
    if found is not None:
        if not mode and not variable_store.is_own(found):
            raise ValueError(
                f"get_variable: {full_name!r} exists already: {found.variable.described}. To share "
                "it say so, `with variable_scope(..., reuse=True):` or "
                "get_variable(..., reuse=AUTO_REUSE); for another variable take another name, or "
                "`with variable_scope('other'):`."
            )
        _check_fits(found.variable, full_name, wanted, dtype, initializer)
        return found.variable
    if mode is True:
        known = ", ".join(map(repr, sorted(entries))) or "none"
        raise ValueError(
            f"get_variable: {full_name!r} does not exist, but reuse=True asks for a variable that "
            f"does. Known here: {known}. Make it before, outside of the scope that reuses, or use "
            "reuse=AUTO_REUSE."
        )
    variable = Variable(
        _make_initial_value(
            full_name, wanted, dtype or scope.dtype, initializer, scope.initializer
        ),
        trainable=trainable,
        name=full_name,
        dtype=dtype or (None if _is_value(initializer) else scope.dtype),
        shape=wanted,
        synchronization=synchronization,
        aggregation=aggregation,
    )
    entries[full_name] = NamedVariable(variable, variable_store.get_current_pass())
    return variable


def _check_shape(shape: int | Sequence[int], name: str) -> tuple[int, ...]:
    sizes: tuple[Any, ...] = (shape,)
    if isinstance(shape, Iterable):
        sizes = tuple(shape)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
        raise ValueError(
            f"get_variable: shape={shape!r} of {name!r} is not a shape. Expected ints of at least "
            "0, for example shape=(3, 4), all of them known."
        )
    return tuple(map(int, sizes))


def _is_value(initializer: object) -> bool:
    return initializer is not None and not callable(initializer)


def _check_fits(
    variable: Variable,
    name: str,
    shape: tuple[int, ...] | None,
    dtype: jax.typing.DTypeLike | None,
    initializer: Initializer | None,
) -> None:
    """Raises if the variable that exists is not what is asked for."""
    if shape is None and _is_value(initializer):
        shape = np.asarray(initializer).shape
    if shape is not None and shape != variable.shape:
        raise ValueError(
            f"get_variable: shape={shape} was asked for, but {name!r} exists with shape "
            f"{variable.shape}: {variable.described}. Ask for the same shape, or take another name."
        )
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != variable.dtype:
        raise ValueError(
            f"get_variable: dtype={np.dtype(dtype).name} was asked for, but {name!r} exists with "
            f"data type {np.dtype(variable.dtype).name}: {variable.described}. Ask for the same "
            "data type, or take another name."
        )


def _make_initial_value(
    name: str,
    shape: tuple[int, ...] | None,
    dtype: jax.typing.DTypeLike | None,
    initializer: Initializer | None,
    inherited: Initializer | None,
) -> Any:
    """Returns an initial value, or a function without arguments that makes it."""
    if _is_value(initializer):
        if shape is not None:
            raise ValueError(
                f"get_variable: {name!r} has both shape={shape} and an initial value of shape "
                f"{np.asarray(initializer).shape}. Leave the shape out, or pass a function: "
                "initializer=jnp.zeros."
            )
        return initializer
    if shape is None:
        if initializer is None:
            raise ValueError(
                f"get_variable: {name!r} is new and its shape is not known. Pass "
                "shape=(...), or an initial value: initializer=[0.0, 0.0]."
            )
        return initializer
    make = inherited if initializer is None else initializer
    kind = jax.dtypes.canonicalize_dtype(dtype or np.float32)
    if make is None:
        return _make_default(name, shape, kind)
    if not callable(make):
        # A scope's value fills every shape.
        return lambda: jnp.full(shape, jnp.asarray(make), kind)
    if _wants_key(make):
        return lambda: make(jax.random.key(_compute_seed(name)), shape, kind)
    return lambda: make(shape, kind)


def _wants_key(make: Callable[..., Any]) -> bool:
    """Tells whether an initializer takes a key first, as those of JAX do."""
    try:
        names = list(inspect.signature(make).parameters)
    except ValueError:  # Without a signature, as some that are written in C.
        return False
    return bool(names) and names[0] in ("key", "rng")


def _compute_seed(name: str) -> int:
    # The same in every process and every run, unlike Python's own hash of a string.
    return zlib.crc32(name.encode())


def _make_default(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if not jnp.issubdtype(dtype, jnp.floating):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"get_variable: {name!r} of data type {dtype.name} has no default initial value. "
                "Pass one: initializer=jnp.zeros."
            )
        return np.zeros(shape, dtype)
    field_size = math.prod(shape[:-2])
    fan_in, fan_out = (
        (shape[-2] * field_size, shape[-1] * field_size) if len(shape) > 1 else (shape or (1,)) * 2
    )
    limit = math.sqrt(6.0 / max(2.0, fan_in + fan_out))
    return np.random.default_rng(_compute_seed(name)).uniform(-limit, limit, shape).astype(dtype)

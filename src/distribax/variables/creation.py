"""Making a variable: its initial value, checks, and the rules inside `dx.function`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import context, contracts, jax_private
from distribax.context import reuse
from distribax.context.scoped import set_within
from distribax.execution import frames
from distribax.types import VariableAggregation, VariableSynchronization
from distribax.variables import initializers

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Policy:
    """How a variable's copies relate, and whether it is trained."""

    synchronization: VariableSynchronization | str
    aggregation: VariableAggregation | str
    trainable: bool | None


_place_without: ContextVar[str | None] = ContextVar("distribax_no_variables", default=None)


def forbid(place: str) -> AbstractContextManager[None]:
    """Lets no variable be created inside, as nobody would own it; `place` says where."""
    return set_within(_place_without, place)


_imposed: ContextVar[Policy | None] = ContextVar("distribax_variable_policy", default=None)


def impose(policy: Policy) -> AbstractContextManager[None]:
    """Gives every variable that is created inside this policy, whatever its maker asks for."""
    return set_within(_imposed, policy)


_beside: ContextVar[object] = ContextVar("distribax_colocated", default=None)


def colocate(beside: object) -> AbstractContextManager[None]:
    """Creates variables beside a variable, or on a device."""
    return set_within(_beside, beside)


def get_colocated() -> object:
    """Returns what variables are created beside now, or None."""
    return _beside.get()


def get_policy(asked: Policy) -> Policy:
    """Returns the policy of a variable that is created now."""
    return _imposed.get() or asked


def decide_trainable(given: bool | None, sync: VariableSynchronization) -> bool:
    """Returns whether the variable is trainable; an ON_READ variable only if that is asked for."""
    return sync is not VariableSynchronization.ON_READ if given is None else bool(given)


def settle_synchronization(
    sync: VariableSynchronization, placement: contracts.Placement
) -> VariableSynchronization:
    """Returns what AUTO has become: copies are kept the same by every write."""
    if sync is VariableSynchronization.AUTO and placement.has_copies:
        return VariableSynchronization.ON_WRITE
    return sync


def check_same_name(made: str, asked: object, place: str, replica_id: object) -> None:
    """Raises if a replica creates a variable of another name than the first replica has."""
    if asked is not None and asked != made:
        raise RuntimeError(
            f"dx.Variable: replica {replica_id} creates the variable {asked!r} at {place}, where "
            f"replica 0 has created {made!r}. All replicas share one variable; give it the same "
            "name in each."
        )


def check_unsupported(variable_def: object, constraint: object, name: str) -> None:
    """Raises for arguments of TensorFlow's variables that cannot have an effect."""
    if variable_def is not None:
        raise ValueError(
            f"dx.Variable: {name!r} has variable_def={variable_def!r}. Variables are made from "
            "initial values only; to get one back from a file, use dx.Checkpoint(v=v).restore()."
        )
    if constraint is not None and not callable(constraint):
        raise ValueError(
            f"dx.Variable: {name!r} has constraint={constraint!r}. Expected a function that takes "
            "the value and returns one, such as lambda x: jnp.clip(x, 0, 1), or None."
        )


def check_aggregation(aggregation: VariableAggregation, dtype: np.dtype[Any], name: str) -> None:
    """Raises if the aggregation cannot give a value of the variable's data type."""
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"dx.Variable: {name!r} has aggregation=MEAN and the data type {np.dtype(dtype).name}, "
            "which cannot hold a mean. Use dtype=jnp.float32, or "
            "aggregation=dx.VariableAggregation.SUM or ONLY_FIRST_REPLICA."
        )


def compute_initial(
    value: object,
    dtype: jax.typing.DTypeLike | None,
    shape: Sequence[int] | None,
    name: str,
) -> jax.Array | np.ndarray:
    """Returns the initial value as an array, computed outside any trace."""
    if value is None:
        raise ValueError(
            f"dx.Variable: initial_value of {name!r} is missing. Pass a number, an array, or a "
            "function without arguments that returns one: dx.Variable(lambda: jnp.zeros((3,)))."
        )
    place = _place_without.get()
    if place is not None:
        raise ValueError(
            f"dx.Variable: {name!r} was created in {place}, which is called for each element: it "
            "would be another variable each time. Create it outside, and use it there."
        )
    frame = frames.current()
    if frame is not None and not frame.function.allow_creation:
        raise ValueError(
            f"dx.Variable: {name!r} was created inside a dx.function that has run before. A "
            "function may create variables on its first call only: create it outside, or keep it "
            "and guard it with `if self.v is None: self.v = dx.Variable(...)`."
        )
    if frame is not None:
        frame.function.has_created = True
    made: Any
    if callable(value):
        make = functools.partial(initializers.make_whole, value, shape, dtype)
        made = frames.run_outside(make)
    else:
        made = value
    if jax_private.is_tracer(made):
        # What the code has computed so far is computed now, as the variable exists from now on.
        made = None if frame is None else frame.evaluate(made)
        if made is None:
            raise ValueError(
                f"dx.Variable: initial_value of {name!r} is computed inside a JAX transformation. "
                "Create the variable outside of it, or use dx.function instead of jax.jit."
            )
    if jax_private.is_key(made):
        raise ValueError(
            f"dx.Variable: initial_value of {name!r} is an array of random keys. Keep their "
            "numbers, dx.Variable(jax.random.key_data(key)), and make keys of them on use, "
            "jax.random.wrap_key_data(v.value())."
        )
    array = _as_array(made, dtype)
    if shape is not None and tuple(shape) != tuple(array.shape):
        raise ValueError(
            f"dx.Variable: {name!r} has shape={tuple(shape)}, but its initial value has shape "
            f"{tuple(array.shape)}."
        )
    return array


def _as_array(
    value: jax.typing.ArrayLike, dtype: jax.typing.DTypeLike | None
) -> jax.Array | np.ndarray:
    # What is on the host needs no JAX operation, which would be compiled for each shape.
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value, dtype=jax.dtypes.canonicalize_dtype(dtype or type(value)))
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value, dtype=jax.dtypes.canonicalize_dtype(dtype or value.dtype))
    return jax_private.run_outside_trace(lambda: jnp.asarray(value, dtype=dtype))


@jax_private.leave_mesh()
def make_buffer(placement: contracts.Placement, value: jax.typing.ArrayLike) -> jax.Array:
    """Returns the first buffer: a copy, so that the caller's array is never overwritten."""
    return jax_private.run_outside_trace(lambda: placement.store_initial(np.array(value)))


def find_creation_line(frame: FrameType | None) -> str:
    """Returns the file and line outside the library from which a variable is created."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class CreatedByStrategy(type):
    """Lets the strategy in scope create a variable, and replicas share the one they create."""

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    if not TYPE_CHECKING:  # Type checkers read the signature of `__init__`.

        def __call__(cls, *args: object, **kwargs: object) -> Any:
            make = super().__call__
            reused = reuse.get_reused_objects()
            asked = kwargs.get("name", args[2] if len(args) > 2 else None)
            if reused is None:
                return cls._create(make, asked, args, kwargs)
            return reused.get_or_create(cls, asked, lambda: cls._create(make, asked, args, kwargs))

        def _create(
            cls,
            make: Callable[..., Any],
            asked: object,
            args: tuple[object, ...],
            kwargs: dict[str, object],
        ) -> Any:
            extended = context.get_strategy().extended
            created = False

            def create() -> Any:
                nonlocal created
                created = True
                return extended.create_variable(make, args, kwargs)

            replica = context.get_replica_context()
            if replica is None:
                return create()
            place = find_creation_line(sys._getframe(1))
            variable = replica.runner.create_variable(create, place)
            if not created:
                made = variable.name.removesuffix(":0")
                check_same_name(made, asked, place, replica.runner.replica_id)
            return variable

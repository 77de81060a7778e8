"""Reading and writing a variable in each context: across replicas, in one, in an update."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distribax import context, contracts, jax_private
from distribax.errors import VariableInJitError
from distribax.execution import frames, overlay, remote_writes
from distribax.topology import REPLICA_AXIS, launch_lock
from distribax.types import ReduceOp, VariableAggregation, WriteKind, is_python_number
from distribax.values import (
    ArrayLike,
    DistributedValues,
    Mirrored,
    PerReplica,
    divide,
    is_wrapped,
    widen,
)
from distribax.variables.placement import PlacedVariable

_FIRST = VariableAggregation.ONLY_FIRST_REPLICA

WHOLE = object()
"""The index of a write that is not to a part of the variable."""

Assigned: TypeAlias = jax.typing.ArrayLike | DistributedValues
"""What a variable can be written with."""


def read(variable: PlacedVariable) -> jax.Array:
    """Returns the variable's value as the current context sees it."""
    here = context.current()
    if variable.placement.has_copies:
        _check_strategy(variable, here, "read_value")
    frame = frames.current()
    if isinstance(frame, frames.RunFrame):
        value = frame.read(variable)
        in_one_copy = here.replica_context is not None or here.copy_id is not None
        if in_one_copy or not variable.per_replica:
            return value
        return _combine_local(variable, value)
    if frame is not None:
        value = frame.read(variable)
        return _combine(variable, value) if variable.per_replica else value
    index = copy_index(variable, here)
    if index is not None:
        return variable.placement.split(variable.share())[index]
    if variable.per_replica:
        return _combine(variable, variable.share())
    return jax_private.localize(variable.share())


def guard_read(variable: contracts.Table) -> None:
    """Makes sure that no JAX transformation remembers the value being read.

    Raises:
        VariableInJitError: `jax.jit` is tracing, and would keep the value.
    """
    if not jax_private.is_tracing():
        return
    frame = frames.current()
    staging = list(jax_private.iterate_staging(None if frame is None else frame.trace))
    if not staging:
        return
    if any(map(jax_private.is_for_jit, staging)):
        inside = "" if frame is None else ", in a dx.function"
        raise VariableInJitError(
            f"read_value: {variable.described} is read inside jax.jit{inside}. jax.jit, "
            "and jax.eval_shape, remember what they have traced, the value of the variable "
            "included, and would use it again in later calls. Decorate the function with "
            "@dx.function instead of @jax.jit, or pass it the variable as an argument: fn(x, v)."
        )
    jax_private.note_closures(staging)


def _check_strategy(variable: PlacedVariable, here: context.Entry, what: str) -> None:
    """Raises if another strategy than the variable's is in charge."""
    if here.strategy is not variable.distribute_strategy and context.has_strategy():
        raise RuntimeError(
            f"{what}: {variable.described} belongs to a "
            f"{type(variable.distribute_strategy).__name__}, and was used where another strategy, "
            f"a {type(here.strategy).__name__}, is in charge. Use it outside that scope, or create "
            "it inside `with strategy.scope():` of the strategy that uses it."
        )


def copy_index(variable: PlacedVariable, here: context.Entry) -> int | None:
    """Returns which copy an eager replica, or an update, is to use; None for the whole."""
    if len(variable.devices) == 1 and not variable.per_replica:
        return None
    if here.copy_id is not None:
        return here.copy_id
    if here.replica_context is not None and variable.distribute_strategy is here.strategy:
        return here.replica_context.runner.copy_id
    return None


def _check_readable(variable: PlacedVariable) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"read_value: {variable.described} is ON_READ with aggregation=NONE, so outside the "
            "replicas it has no one value. Read it in strategy.run(), take the copies with "
            "strategy.experimental_local_results(v), or give it an aggregation: "
            "dx.Variable(..., aggregation=dx.VariableAggregation.SUM)."
        )


@jax_private.leave_mesh()
def _combine(variable: PlacedVariable, stacked: jax.Array) -> jax.Array:
    """Combines the replicas' values, stacked along dimension 0."""
    _check_readable(variable)
    calls = jax_private.joint_calls
    with calls.record_for(lambda: f"read of {variable.described}", stacked) as call:
        combined = _combine_stacked(stacked, variable.aggregation)
        call.set_results([combined])
    return jax_private.localize(combined)


@functools.partial(jax.jit, static_argnums=1)
def _combine_stacked(stacked: jax.Array, aggregation: VariableAggregation) -> jax.Array:
    if aggregation is _FIRST:
        return stacked[0]
    if aggregation is VariableAggregation.SUM:
        return stacked.sum(axis=0).astype(stacked.dtype)
    return stacked.mean(axis=0)


def _combine_local(variable: PlacedVariable, value: jax.Array) -> jax.Array:
    _check_readable(variable)
    if variable.aggregation is _FIRST:
        return take_first_replica(value)
    if variable.aggregation is VariableAggregation.SUM:
        # JAX counts truth values; the variable keeps its type.
        return lax.psum(value, REPLICA_AXIS).astype(value.dtype)
    return divide(lax.psum(widen(value), REPLICA_AXIS), lax.axis_size(REPLICA_AXIS), value.dtype)


def take_first_replica(value: jax.Array) -> jax.Array:
    """Returns replica 0's value to all replicas, inside an SPMD program."""
    chosen = jnp.where(lax.axis_index(REPLICA_AXIS) == 0, value, jnp.zeros_like(value))
    if chosen.dtype == jnp.bool_:
        return lax.psum(chosen.astype(jnp.int32), REPLICA_AXIS).astype(jnp.bool_)
    return lax.psum(chosen, REPLICA_AXIS)


# Writing.


@jax_private.leave_mesh()
def write(
    variable: PlacedVariable, value: Assigned, kind: WriteKind, index: object = WHOLE
) -> None:
    """Assigns, adds or subtracts `value`, by the rules of the current context.

    With an `index`, it is written to that part of the variable.
    """
    jax_private.forget_closures()
    if variable.source is not None:
        assert index is WHOLE
        _send(variable, value, kind)
        return
    here = context.current()
    if variable.placement.mesh is not None:
        _check_strategy(variable, here, str(kind))
    if not _is_one_of_several(here):
        # No other thread may write between the read and the write of `assign_add`.
        with launch_lock:
            if here.copy_id is None and variable.per_replica:
                _write_across(variable, value, kind, index)
            else:
                _put(variable, _compute_new(variable, unwrap(value), kind, index), here)
        return
    if variable.distribute_strategy is not here.strategy:
        raise ValueError(
            f"{kind}: {variable.described} was not created under the strategy "
            f"{type(here.strategy).__name__} whose replica writes it. Create it inside "
            "`with strategy.scope():`."
        )
    if variable.per_replica:
        with launch_lock:
            new = _compute_new(variable, unwrap(value), kind, index)
            if here.replica_context is not None and here.replica_context.runner.is_idle:
                new = _leave_out(variable, new)
            _put(variable, new, here)
        return
    _write_together(variable, value, kind, index, here)


def _is_one_of_several(here: context.Entry) -> bool:
    """Tells whether the code runs for one replica, where others write the same variables."""
    in_replica = here.replica_context is not None and here.copy_id is None
    return in_replica and not here.strategy.extended.single


def is_written_together(variable: PlacedVariable) -> bool:
    """Tells whether all replicas write a variable at once, so that their values become one."""
    here = context.current()
    if not _is_one_of_several(here) or variable.source is not None or variable.per_replica:
        return False
    return variable.distribute_strategy is here.strategy


def _leave_out(variable: PlacedVariable, new: jax.Array) -> jax.Array:
    """Returns what an idle replica writes: what there was, in place of NaNs or of anything."""
    if not variable.counts_idle:
        return read(variable)
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    return jnp.where(jnp.isnan(new).any(), read(variable), new)


def _send(variable: PlacedVariable, value: Assigned, kind: WriteKind) -> None:
    """Writes a variable that lives in another process: there, and at once or after the step."""
    value = fit(variable, unwrap(value), kind)
    stand_in = overlay.find_overlay(variable)
    seen = None if stand_in is None else _change(variable.read_value(), value, kind)
    frame = frames.current()
    if frame is not None:
        frame.function.defer(variable, kind, value)
    else:
        assert variable.source is not None
        refuse_staged(variable, value)
        variable.source.write(variable, kind, value)
    if stand_in is not None:
        overlay.replace(stand_in, variable, frames.detach(seen))


def check_combinable(variable: PlacedVariable, what: str) -> None:
    """Raises if it is not known how the values that replicas write to a variable become one."""
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"{what}: {variable.described} is mirrored and has aggregation=NONE, so it is not "
            "clear how the replicas' values become one. Say it when you create it, "
            "dx.Variable(..., aggregation=dx.VariableAggregation.MEAN) (or SUM, "
            "ONLY_FIRST_REPLICA), or write it outside the replicas: "
            "dx.get_replica_context().merge_call(lambda strategy, x: "
            f"strategy.extended.update(v, lambda v, x: v.{what}(x), args=(x,)), args=(x,))."
        )


def _write_together(
    variable: PlacedVariable,
    value: Assigned,
    kind: WriteKind,
    index: object,
    here: context.Entry,
) -> None:
    """Writes a mirrored variable from all replicas at once."""
    aggregation = variable.aggregation
    check_combinable(variable, str(kind))
    if is_python_number(value):
        if aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"{kind}: {variable.described} has aggregation=SUM and was given the Python number "
                f"{value!r} in a replica; whether the sum counts it once or once per replica is "
                f"not clear. Pass an array, {kind}(jnp.asarray({value!r})), or use MEAN."
            )
    else:
        value = frames.detach(jnp.asarray(value, dtype=None))
        refuse_staged(variable, value)

    def together(strategy: contracts.Strategy, value: Assigned) -> None:
        if is_wrapped(value):
            if aggregation is _FIRST:
                value = strategy.extended.first_value(value)
            else:
                op = ReduceOp.from_variable_aggregation(aggregation)
                value = strategy.extended.reduce_to(op, value, variable)
        elif aggregation is VariableAggregation.SUM and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"{kind}: {variable.described} has aggregation=SUM and was given one array that "
                "all replicas share; whether the sum counts it once or once per replica is not "
                f"clear. Pass each replica's own, {kind}(x + 0), or use MEAN."
            )
        strategy.extended.update(variable, lambda v, x: write(v, x, kind, index), args=(value,))

    assert here.replica_context is not None
    if index is not WHOLE and aggregation is not _FIRST and _may_differ(index):
        part = fit(variable, unwrap(value), kind, index)
        value = _spread(variable, part, kind, index, here.replica_context)
        index = WHOLE
        if kind is WriteKind.ASSIGN:
            aggregation = _FIRST  # It is the same in all replicas.
    index = jax.tree.map(_share_index, index)
    here.replica_context.merge_call(together, args=(value,))
    stand_in = overlay.find_overlay(variable)
    if stand_in is not None:
        overlay.replace(stand_in, variable, read(variable))


def _may_differ(index: object) -> bool:
    """Tells whether replicas may write different parts: in eager code each has its own numbers."""
    return frames.current() is None or any(map(jax_private.is_tracer, jax.tree.leaves(index)))


def _spread(
    variable: PlacedVariable,
    part: jax.Array,
    kind: WriteKind,
    index: Any,
    replica: context.ReplicaContext,
) -> jax.Array:
    """Returns what to write to all of a variable in place of this replica's part.

    Where replicas assign the same elements, their values are combined.
    """
    zeros = jnp.zeros(variable.shape, variable.dtype)
    if kind is not WriteKind.ASSIGN:
        return zeros.at[index].add(part)
    count = jnp.zeros(variable.shape, jnp.int32).at[index].set(1)
    is_mean = variable.aggregation is VariableAggregation.MEAN
    own = zeros.at[index].set(part)
    total, count = replica.all_reduce(ReduceOp.SUM, [widen(own) if is_mean else own, count])
    if is_mean:
        total = divide(total, jnp.maximum(count, 1), variable.dtype)
    return jnp.where(count > 0, total, variable.read_value())


def _share_index(part: object) -> object:
    """Returns the first replica's index, so that all write the same part of their copies."""
    return take_first_replica(part) if jax_private.is_tracer(part) else part


def _write_across(
    variable: PlacedVariable, value: Assigned, kind: WriteKind, index: object
) -> None:
    """Writes a variable that has a value in each replica from outside the replicas."""
    if variable.aggregation is VariableAggregation.SUM:
        if kind is not WriteKind.ASSIGN:
            raise ValueError(
                f"{kind}: {variable.described} is ON_READ with aggregation=SUM; outside the "
                "replicas it is not clear which replica's part changes. Call it in "
                "strategy.run(), or use assign(), which spreads the value evenly."
            )
        value = jnp.asarray(unwrap(value)) / variable.placement.num_copies
        value = value.astype(variable.dtype)
    frame = frames.current()
    count = variable.placement.num_copies
    value = fit(variable, unwrap(value), kind, index)
    if isinstance(frame, frames.RunFrame):
        frame.write(variable, _change(frame.read(variable), value, kind, index))
        return
    if frame is not None:
        stacked = jnp.broadcast_to(value, (count, *value.shape))
        if kind is not WriteKind.ASSIGN or index is not WHOLE:
            change = functools.partial(_change, kind=kind, index=index)
            stacked = jax.vmap(change)(frame.read(variable), stacked)
        frame.write(variable, stacked)
        return
    pieces = variable.placement.split(variable.share())
    new = [_change(piece, value, kind, index) for piece in pieces]
    variable.store(variable.placement.join(new, variable.share()))


def _compute_new(
    variable: PlacedVariable, value: jax.typing.ArrayLike, kind: WriteKind, index: object
) -> jax.Array:
    """Returns the value that the variable, or the copy in this context, is to have."""
    value = fit(variable, value, kind, index)
    if kind is WriteKind.ASSIGN and index is WHOLE:
        return value
    old = variable.read_value()
    new = _change(old, value, kind, index)
    return frames.detach(new) if overlay.find_overlay(variable) else new


def _change(old: jax.Array, value: jax.Array, kind: WriteKind, index: object = WHOLE) -> jax.Array:
    if index is not WHOLE:
        return remote_writes.change_part(old, kind, index, value)
    if kind is WriteKind.ASSIGN:
        return value
    return (old + value if kind is WriteKind.ASSIGN_ADD else old - value).astype(old.dtype)


def fit(
    variable: PlacedVariable,
    value: jax.typing.ArrayLike,
    kind: WriteKind,
    index: object = WHOLE,
) -> jax.Array:
    """Returns `value` as an array of the data type of the variable, and of its part's shape."""
    array = frames.detach(_as_array(variable, value, kind))
    given, wanted = array.dtype, variable.dtype
    if not can_become(given, wanted) and not _is_whole(value):
        raise ValueError(
            f"{kind}: a value of data type {given.name} does not fit {variable.described} of data "
            f"type {wanted.name}. Convert it first: value.astype({wanted.name!r})."
        )
    shape = variable.shape
    if index is not WHOLE:
        shape = jax.eval_shape(lambda x: x[index], jax.ShapeDtypeStruct(shape, wanted)).shape
    scalar_fits = index is not WHOLE or kind is not WriteKind.ASSIGN
    if array.shape != shape and not (scalar_fits and array.shape == ()):
        part = "" if index is WHOLE else f"[{index!r}] of "
        raise ValueError(
            f"{kind}: a value of shape {tuple(array.shape)} does not fit {part}"
            f"{variable.described}. Expected shape {shape}."
        )
    return array.astype(wanted)


def can_become(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Tells whether numbers keep their meaning, if not all of their digits, as another type."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    ranks = [
        [rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)]
        for dtype in (given, wanted)
    ]
    return ranks[0] <= ranks[1]


def _as_array(variable: PlacedVariable, value: jax.typing.ArrayLike, kind: WriteKind) -> jax.Array:
    try:
        array = jnp.asarray(_leave_foreign_mesh(variable, value))
    except (TypeError, ValueError) as error:
        if isinstance(value, ArrayLike):
            raise
        raise ValueError(
            f"{kind}: the value {value!r} for {variable.described} is not an array of numbers. "
            f"{error}"
        ) from error
    if jax_private.is_key(array):
        raise ValueError(
            f"{kind}: the value for {variable.described} is an array of random keys. Write their "
            "numbers: jax.random.key_data(key)."
        )
    return array


def _is_whole(value: Any) -> bool:
    """Tells whether a Python number has no fraction, so that an integer can be it."""
    if not is_python_number(value):
        return False
    return bool(np.isfinite(value)) and value == int(value.real)


def _leave_foreign_mesh(
    variable: PlacedVariable, value: jax.typing.ArrayLike
) -> jax.typing.ArrayLike:
    """Returns an array of the mesh that the user has set as one of the host."""
    if not isinstance(value, jax.Array) or jax_private.is_tracer(value):
        return value
    meshes = [getattr(each, "mesh", None) for each in (value.sharding, variable.program_sharding)]
    return value if meshes[0] is None or meshes[0] == meshes[1] else np.asarray(value)


def unwrap(value: Assigned) -> jax.typing.ArrayLike:
    """Returns the one value to write outside the replicas."""
    if isinstance(value, Mirrored):
        return value.get()
    if is_wrapped(value):
        own = value.find_own() if isinstance(value, PerReplica) else None
        if own is not None:
            return own
        raise ValueError(
            "assign: the value differs per replica (PerReplica), but the write is outside the "
            "replicas. Combine it first: strategy.reduce('MEAN', value, axis=None)."
        )
    return value


def _put(variable: PlacedVariable, value: jax.Array, here: context.Entry) -> None:
    frame = frames.current()
    if frame is not None:
        frame.write(variable, value)
    else:
        refuse_staged(variable, value)
        index = copy_index(variable, here)
        placement = variable.placement
        if index is None:
            variable.store(placement.store(value))
        else:
            pieces = placement.split(variable.share())
            pieces[index] = value
            variable.store(placement.join(pieces, variable.share()))
    stand_in = overlay.find_overlay(variable)
    if stand_in is not None:
        overlay.replace(stand_in, variable, value)


def refuse_staged(variable: PlacedVariable, value: object) -> None:
    """Raises if a value belongs to a JAX transformation that would end without writing it."""
    if frames.current() is None and jax_private.is_tracer(value):
        raise RuntimeError(
            f"assign: {variable.described} was given a value of a JAX transformation that is "
            "still tracing (jax.jit, jax.lax.scan, ...). Use @dx.function instead of @jax.jit; "
            "for other transformations return the value and assign it outside."
        )

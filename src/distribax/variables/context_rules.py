"""Reading and writing a variable in each context: across replicas, in one, in an update."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from distribax import context, contracts, jax_private
from distribax.execution import frames, overlay
from distribax.topology import REPLICA_AXIS
from distribax.types import ReduceOp, VariableAggregation, WriteKind, is_python_number
from distribax.values import DistributedValues, Local, Mirrored, PerReplica
from distribax.variables.placement import PlacedVariable

_FIRST = VariableAggregation.ONLY_FIRST_REPLICA

Assigned: TypeAlias = "jax.typing.ArrayLike | DistributedValues"
"""What a variable can be written with."""


class Described(Protocol):
    """Something that error messages name."""

    @property
    def described(self) -> str: ...


def read(variable: PlacedVariable) -> jax.Array:
    """Returns the variable's value as the current context sees it."""
    here = context.current()
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
        return variable.placement.pieces(variable.share())[index]
    if variable.per_replica:
        return _combine(variable, variable.share())
    return jax_private.localize(variable.share())


def refuse_in_jit(variable: Described) -> None:
    """Raises if `jax.jit` inside a `dx.function` would remember the value being read."""
    frame = frames.current()
    if frame is not None and jax_private.is_in_jit(frame.trace):
        raise RuntimeError(
            f"read_value: {variable.described} is read inside jax.jit, in a dx.function. jax.jit "
            "remembers what it has traced, this trace's value of the variable included, and would "
            "use it again in the next one. Decorate the inner function with @dx.function instead, "
            "or pass it the value: fn(x, v.value())."
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


def wrap_local(
    variable: PlacedVariable, value: jax.Array, frame: frames.RunFrame
) -> DistributedValues:
    """Returns the copies of a variable as a value inside a compiled run."""
    kind = PerReplica if variable.per_replica else Mirrored
    return kind.of(Local(value, frame.mesh))


def _check_readable(variable: PlacedVariable) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"read_value: {variable.described} is ON_READ with aggregation=NONE, so outside the "
            "replicas it has no one value. Read it in strategy.run(), take the copies with "
            "strategy.experimental_local_results(v), or give it an aggregation: "
            "dx.Variable(..., aggregation=dx.VariableAggregation.SUM)."
        )


def _combine(variable: PlacedVariable, stacked: jax.Array) -> jax.Array:
    """Combines the replicas' values, stacked along dimension 0."""
    _check_readable(variable)
    if variable.aggregation is _FIRST:
        combine = _first
    else:
        combine = _sum if variable.aggregation is VariableAggregation.SUM else _mean
    calls = jax_private.joint_calls
    with calls.record_for(lambda: f"read of {variable.described}", stacked) as call:
        combined = combine(stacked)
        call.set_results([combined])
    return jax_private.localize(combined)


@jax.jit
def _sum(stacked: jax.Array) -> jax.Array:
    return stacked.sum(axis=0).astype(stacked.dtype)


@jax.jit
def _mean(stacked: jax.Array) -> jax.Array:
    return stacked.mean(axis=0)


@jax.jit
def _first(stacked: jax.Array) -> jax.Array:
    return stacked[0]


def _combine_local(variable: PlacedVariable, value: jax.Array) -> jax.Array:
    _check_readable(variable)
    if variable.aggregation is _FIRST:
        return take_first_replica(value)
    total = lax.psum(value, REPLICA_AXIS)
    if variable.aggregation is VariableAggregation.SUM:
        return total
    return total / lax.axis_size(REPLICA_AXIS)


def take_first_replica(value: jax.Array) -> jax.Array:
    """Returns replica 0's value to all replicas, inside an SPMD program."""
    chosen = jnp.where(lax.axis_index(REPLICA_AXIS) == 0, value, jnp.zeros_like(value))
    if chosen.dtype == jnp.bool_:
        return lax.psum(chosen.astype(jnp.int32), REPLICA_AXIS).astype(jnp.bool_)
    return lax.psum(chosen, REPLICA_AXIS)


# Writing.


def write(variable: PlacedVariable, value: Assigned, kind: WriteKind) -> None:
    """Assigns, adds or subtracts `value`, by the rules of the current context."""
    if variable.source is not None:
        _send(variable, value, kind)
        return
    here = context.current()
    in_replica = here.replica_context is not None and here.copy_id is None
    if not in_replica or here.strategy.extended.single:
        if here.copy_id is None and variable.per_replica:
            _write_across(variable, value, kind)
        else:
            _put(variable, _compute_new(variable, _unwrap(value), kind), here)
        return
    if variable.distribute_strategy is not here.strategy:
        raise ValueError(
            f"{kind}: {variable.described} was not created under the strategy "
            f"{type(here.strategy).__name__} whose replica writes it. Create it inside "
            "`with strategy.scope():`."
        )
    if variable.per_replica:
        _put(variable, _compute_new(variable, _unwrap(value), kind), here)
        return
    _write_together(variable, value, kind, here)


def _send(variable: PlacedVariable, value: Assigned, kind: WriteKind) -> None:
    """Writes a variable that lives in another process: there, and at once or after the step."""
    value = _fit(variable, _unwrap(value), kind)
    stand_in = overlay.find_overlay(variable)
    seen = None if stand_in is None else _change(variable.read_value(), value, kind)
    frame = frames.current()
    if frame is not None:
        frame.function.defer(variable, kind, value)
    else:
        assert variable.source is not None
        _refuse_staged(variable, value)
        variable.source.write(variable, kind, value)
    if stand_in is not None:
        stand_in[variable] = frames.detach(seen)


def _write_together(
    variable: PlacedVariable, value: Assigned, kind: WriteKind, here: context.Entry
) -> None:
    """Writes a mirrored variable from all replicas at once."""
    aggregation = variable.aggregation
    if aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"{kind}: {variable.described} is mirrored and has aggregation=NONE, so it is not "
            "clear how the replicas' values become one. Say it when you create it, "
            "dx.Variable(..., aggregation=dx.VariableAggregation.MEAN) (or SUM, "
            "ONLY_FIRST_REPLICA), or write it outside the replicas: "
            "dx.get_replica_context().merge_call(lambda strategy, x: "
            "strategy.extended.update(v, lambda v, x: v.assign(x), args=(x,)), args=(x,))."
        )
    if is_python_number(value):
        if aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"{kind}: {variable.described} has aggregation=SUM and was given the Python number "
                f"{value!r} in a replica; whether the sum counts it once or once per replica is "
                f"not clear. Pass an array, {kind}(jnp.asarray({value!r})), or use MEAN."
            )
    else:
        value = frames.detach(jnp.asarray(value, dtype=None))
        _refuse_staged(variable, value)

    def together(strategy: contracts.Strategy, value: Assigned) -> None:
        if isinstance(value, DistributedValues):
            if aggregation is _FIRST:
                value = strategy.extended.first_value(value, variable)
            else:
                op = ReduceOp.from_variable_aggregation(aggregation)
                value = strategy.extended.reduce_to(op, value, variable)
        elif aggregation is VariableAggregation.SUM and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"{kind}: {variable.described} has aggregation=SUM and was given one array that "
                "all replicas share; whether the sum counts it once or once per replica is not "
                f"clear. Pass each replica's own, {kind}(x + 0), or use MEAN."
            )
        strategy.extended.update(variable, lambda v, x: write(v, x, kind), args=(value,))

    assert here.replica_context is not None
    here.replica_context.merge_call(together, args=(value,))
    stand_in = overlay.find_overlay(variable)
    if stand_in is not None:
        stand_in[variable] = read(variable)


def _write_across(variable: PlacedVariable, value: Assigned, kind: WriteKind) -> None:
    """Writes a variable that has a value in each replica from outside the replicas."""
    if variable.aggregation is VariableAggregation.SUM:
        if kind is not WriteKind.ASSIGN:
            raise ValueError(
                f"{kind}: {variable.described} is ON_READ with aggregation=SUM; outside the "
                "replicas it is not clear which replica's part changes. Call it in "
                "strategy.run(), or use assign(), which spreads the value evenly."
            )
        value = jnp.asarray(_unwrap(value)) / variable.placement.num_copies
        value = value.astype(variable.dtype)
    frame = frames.current()
    count = variable.placement.num_copies
    value = _fit(variable, _unwrap(value), kind)
    if isinstance(frame, frames.RunFrame):
        frame.write(variable, _change(frame.read(variable), value, kind))
        return
    stacked = jnp.broadcast_to(value, (count, *variable.shape))
    if frame is not None:
        is_new = kind is WriteKind.ASSIGN
        frame.write(variable, stacked if is_new else _change(frame.read(variable), stacked, kind))
        return
    pieces = variable.placement.pieces(variable.share())
    new = [_change(piece, value, kind) for piece in pieces]
    variable.store(variable.placement.join(new, variable.share()))


def _compute_new(
    variable: PlacedVariable, value: jax.typing.ArrayLike, kind: WriteKind
) -> jax.Array:
    """Returns the value that the variable, or the copy in this context, is to have."""
    value = _fit(variable, value, kind)
    if kind is WriteKind.ASSIGN:
        return value
    old = variable.read_value()
    stand_in = overlay.find_overlay(variable)
    return frames.detach(_change(old, value, kind)) if stand_in else _change(old, value, kind)


def _change(old: jax.Array, value: jax.Array, kind: WriteKind) -> jax.Array:
    if kind is WriteKind.ASSIGN:
        return value
    return (old + value if kind is WriteKind.ASSIGN_ADD else old - value).astype(old.dtype)


def _fit(variable: PlacedVariable, value: jax.typing.ArrayLike, kind: WriteKind) -> jax.Array:
    """Returns `value` as an array of the variable's shape and data type."""
    array = frames.detach(jnp.asarray(value))
    given, wanted = array.dtype, variable.dtype
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [next(i for i, k in enumerate(kinds) if jnp.issubdtype(d, k)) for d in (given, wanted)]
    if rank[0] > rank[1] and not (is_python_number(value) and value == int(value.real)):
        raise ValueError(
            f"{kind}: a value of data type {given.name} does not fit {variable.described} of data "
            f"type {wanted.name}. Convert it first: value.astype({wanted.name!r})."
        )
    if array.shape != variable.shape and not (kind is not WriteKind.ASSIGN and array.shape == ()):
        raise ValueError(
            f"{kind}: a value of shape {tuple(array.shape)} does not fit {variable.described}. "
            f"Expected shape {variable.shape}."
        )
    return array.astype(wanted)


def _unwrap(value: Assigned) -> jax.typing.ArrayLike:
    if isinstance(value, Mirrored):
        return value.get()
    if isinstance(value, DistributedValues):
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
        _refuse_staged(variable, value)
        index = copy_index(variable, here)
        placement = variable.placement
        if index is None:
            variable.store(placement.store(value))
        else:
            pieces = placement.pieces(variable.share())
            pieces[index] = value
            variable.store(placement.join(pieces, variable.share()))
    stand_in = overlay.find_overlay(variable)
    if stand_in is not None:
        stand_in[variable] = value


def _refuse_staged(variable: PlacedVariable, value: object) -> None:
    if frames.current() is None and jax_private.is_tracer(value):
        raise RuntimeError(
            f"assign: {variable.described} was given a value of a JAX transformation that is "
            "still tracing (jax.jit, jax.lax.scan, ...). Use @dx.function instead of @jax.jit; "
            "for other transformations return the value and assign it outside."
        )

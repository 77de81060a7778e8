"""Reading and writing a variable in each context: across replicas, in one, in an update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distribax import context, jax_private
from distribax.execution import frames, overlay
from distribax.topology import REPLICA_AXIS
from distribax.types import ReduceOp, VariableAggregation, WriteKind, is_python_number
from distribax.values import DistributedValues, Local, Mirrored, PerReplica

_FIRST = VariableAggregation.ONLY_FIRST_REPLICA


def read(variable: Any) -> Any:
    """Returns the variable's value as the current context sees it."""
    here = context.current()
    frame = frames.current()
    if isinstance(frame, frames.RunFrame):
        value = frame.read(variable)
        in_one_copy = here.replica_context is not None or here.copy_id is not None
        if in_one_copy or not variable.per_replica:
            return value
        return _combined_local(variable, value)
    if frame is not None:
        value = frame.read(variable)
        return _combined(variable, value) if variable.per_replica else value
    index = copy_index(variable, here)
    if index is not None:
        return variable.placement.pieces(variable.share())[index]
    if variable.per_replica:
        return _combined(variable, variable.share())
    return jax_private.localize(variable.share())


def refuse_in_jit(variable: Any) -> None:
    """Raises if `jax.jit` inside a `dx.function` would remember the value being read."""
    frame = frames.current()
    if frame is not None and jax_private.is_in_jit(frame.trace):
        raise RuntimeError(
            f"read_value: {variable.described} is read inside jax.jit, in a dx.function. jax.jit "
            "remembers what it has traced, this trace's value of the variable included, and would "
            "use it again in the next one. Decorate the inner function with @dx.function instead, "
            "or pass it the value: fn(x, v.value())."
        )


def copy_index(variable: Any, here: context.Entry) -> int | None:
    """Returns which copy an eager replica, or an update, is to use; None for the whole."""
    if len(variable.devices) == 1 and not variable.per_replica:
        return None
    if here.copy_id is not None:
        return here.copy_id
    if here.replica_context is not None and variable.distribute_strategy is here.strategy:
        return here.replica_context.runner.copy_id
    return None


def local(variable: Any, value: Any, frame: frames.RunFrame) -> DistributedValues:
    """Returns the copies of a variable as a value inside a compiled run."""
    kind = PerReplica if variable.per_replica else Mirrored
    return kind.of(Local(value, frame.mesh))


def _check_readable(variable: Any) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"read_value: {variable.described} is ON_READ with aggregation=NONE, so outside the "
            "replicas it has no one value. Read it in strategy.run(), take the copies with "
            "strategy.experimental_local_results(v), or give it an aggregation: "
            "dx.Variable(..., aggregation=dx.VariableAggregation.SUM)."
        )


def _combined(variable: Any, stacked: Any) -> Any:
    """Combines the replicas' values, stacked along dimension 0."""
    _check_readable(variable)
    if variable.aggregation is _FIRST:
        return jax_private.localize(_first(stacked))
    combine = _sum if variable.aggregation is VariableAggregation.SUM else _mean
    return jax_private.localize(combine(stacked))


@jax.jit
def _sum(stacked: Any) -> Any:
    return stacked.sum(axis=0).astype(stacked.dtype)


@jax.jit
def _mean(stacked: Any) -> Any:
    return stacked.mean(axis=0)


@jax.jit
def _first(stacked: Any) -> Any:
    return stacked[0]


def _combined_local(variable: Any, value: Any) -> Any:
    _check_readable(variable)
    if variable.aggregation is _FIRST:
        return first_replica(value)
    total = lax.psum(value, REPLICA_AXIS)
    if variable.aggregation is VariableAggregation.SUM:
        return total
    return total / lax.axis_size(REPLICA_AXIS)


def first_replica(value: Any) -> Any:
    """Returns replica 0's value to all replicas, inside an SPMD program."""
    chosen = jnp.where(lax.axis_index(REPLICA_AXIS) == 0, value, jnp.zeros_like(value))
    if chosen.dtype == jnp.bool_:
        return lax.psum(chosen.astype(jnp.int32), REPLICA_AXIS).astype(jnp.bool_)
    return lax.psum(chosen, REPLICA_AXIS)


# Writing.


def write(variable: Any, value: Any, kind: WriteKind) -> None:
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
            _put(variable, _new(variable, _plain(value), kind), here)
        return
    if variable.distribute_strategy is not here.strategy:
        raise ValueError(
            f"{kind}: {variable.described} was not created under the strategy "
            f"{type(here.strategy).__name__} whose replica writes it. Create it inside "
            "`with strategy.scope():`."
        )
    if variable.per_replica:
        _put(variable, _new(variable, value, kind), here)
        return
    _write_together(variable, value, kind, here)


def _send(variable: Any, value: Any, kind: WriteKind) -> None:
    """Writes a variable that lives in another process: there, and at once or after the step."""
    value = _fitted(variable, _plain(value), kind)
    stand_in = overlay.find_overlay(variable)
    seen = None if stand_in is None else _changed(variable.read_value(), value, kind)
    frame = frames.current()
    if frame is not None:
        frame.function.defer(variable, kind, value)
    else:
        _refuse_staged(variable, value)
        variable.source.write(variable, kind, value)
    if stand_in is not None:
        stand_in[variable] = frames.detach(seen)


def _write_together(variable: Any, value: Any, kind: WriteKind, here: context.Entry) -> None:
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
                f"{value!r} in a replica; whether the sum counts it once or once a replica is not "
                f"clear. Pass an array, {kind}(jnp.asarray({value!r})), or use MEAN."
            )
    else:
        value = frames.detach(jnp.asarray(value, dtype=None))
        _refuse_staged(variable, value)

    def together(strategy: Any, value: Any) -> None:
        if isinstance(value, DistributedValues):
            if aggregation is _FIRST:
                value = strategy.extended.first_value(value, variable)
            else:
                op = ReduceOp.from_variable_aggregation(aggregation)
                value = strategy.extended.reduce_to(op, value, variable)
        elif aggregation is VariableAggregation.SUM and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"{kind}: {variable.described} has aggregation=SUM and was given one array that "
                "all replicas share; whether the sum counts it once or once a replica is not "
                f"clear. Pass each replica's own, {kind}(x + 0), or use MEAN."
            )
        strategy.extended.update(variable, lambda v, x: write(v, x, kind), args=(value,))

    assert here.replica_context is not None
    here.replica_context.merge_call(together, args=(value,))
    stand_in = overlay.find_overlay(variable)
    if stand_in is not None:
        stand_in[variable] = read(variable)


def _write_across(variable: Any, value: Any, kind: WriteKind) -> None:
    """Writes a variable that has a value in each replica from outside the replicas."""
    if variable.aggregation is VariableAggregation.SUM:
        if kind is not WriteKind.ASSIGN:
            raise ValueError(
                f"{kind}: {variable.described} is ON_READ with aggregation=SUM; outside the "
                "replicas it is not clear which replica's part changes. Call it in "
                "strategy.run(), or use assign(), which spreads the value evenly."
            )
        value = jnp.asarray(_plain(value)) / variable.placement.num_copies
        value = value.astype(variable.dtype)
    frame = frames.current()
    count = variable.placement.num_copies
    value = _fitted(variable, _plain(value), kind)
    if isinstance(frame, frames.RunFrame):
        frame.write(variable, _changed(frame.read(variable), value, kind))
        return
    stacked = jnp.broadcast_to(value, (count, *variable.shape))
    if frame is not None:
        old = frame.read(variable) if kind is not WriteKind.ASSIGN else None
        frame.write(variable, _changed(old, stacked, kind))
        return
    pieces = variable.placement.pieces(variable.share())
    new = [_changed(piece, value, kind) for piece in pieces]
    variable.store(variable.placement.join(new, variable.share()))


def _new(variable: Any, value: Any, kind: WriteKind) -> Any:
    """Returns the value that the variable, or the copy in this context, is to have."""
    value = _fitted(variable, value, kind)
    if kind is WriteKind.ASSIGN:
        return value
    old = variable.read_value()
    stand_in = overlay.find_overlay(variable)
    return frames.detach(_changed(old, value, kind)) if stand_in else _changed(old, value, kind)


def _changed(old: Any, value: Any, kind: WriteKind) -> Any:
    if kind is WriteKind.ASSIGN:
        return value
    return (old + value if kind is WriteKind.ASSIGN_ADD else old - value).astype(old.dtype)


def _fitted(variable: Any, value: Any, kind: WriteKind) -> Any:
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


def _plain(value: Any) -> Any:
    if isinstance(value, PerReplica):
        raise ValueError(
            "assign: the value differs per replica (PerReplica), but the write is outside the "
            "replicas. Combine it first: strategy.reduce('MEAN', value, axis=None)."
        )
    return value.get() if isinstance(value, Mirrored) else value


def _put(variable: Any, value: Any, here: context.Entry) -> None:
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


def _refuse_staged(variable: Any, value: Any) -> None:
    if frames.current() is None and jax_private.is_tracer(value):
        raise RuntimeError(
            f"assign: {variable.described} was given a value of a JAX transformation that is "
            "still tracing (jax.jit, jax.lax.scan, ...). Use @dx.function instead of @jax.jit; "
            "for other transformations return the value and assign it outside."
        )

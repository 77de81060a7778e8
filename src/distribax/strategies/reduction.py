"""Combining and unwrapping values, for all strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from distribax import jax_private
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.execution import frames
from distribax.strategies import idle_values
from distribax.topology import REPLICA_AXIS, launch_lock
from distribax.types import ReduceOp
from distribax.values import (
    DistributedValues,
    Global,
    Local,
    Mirrored,
    Padded,
    PerReplica,
    Pieces,
    get_local_pieces,
    is_wrapped,
    regroup,
)
from distribax.values.layout import cut_to
from distribax.variables import Variable
from distribax.variables.context_rules import take_first_replica


class Combiner(Protocol):
    """What is asked of a strategy's extended interface here."""

    single: bool
    mesh: Mesh | None

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def cross_device_ops(self) -> CrossDeviceOps: ...

    def broadcast_to(self, tensor: jax.typing.ArrayLike, destinations: object = None) -> Any: ...


def as_distributed(extended: Combiner, value: object) -> Any:
    """Returns a variable's copies as a distributed value, and anything else as it is."""
    if isinstance(value, Variable) and not extended.single:
        value = value.distributed()
    mesh = extended.mesh
    if mesh is None or not mesh.is_multi_process or frames.current() is not None:
        return value
    if is_wrapped(value) and value.layout.mesh != mesh:
        # Made by hand, or by a strategy of this process: the other processes have theirs.
        return type(value).of(Pieces(value.values, mesh), value.idle)
    return value


def batch(
    extended: Combiner,
    op: ReduceOp,
    pairs: Sequence[tuple[object, object]],
    options: CommunicationOptions | None,
) -> list[Any]:
    """Reduces values to destinations; plain values follow the rules of `_reduce_plain`."""
    values = [as_distributed(extended, value) for value, _ in pairs]
    wrapped = [index for index, value in enumerate(values) if is_wrapped(value)]
    results: list[Any] = [
        None if is_wrapped(value) else _reduce_plain(extended, op, value) for value in values
    ]
    reduced = idle_values.reduce(
        extended.cross_device_ops,
        op,
        [(values[index], pairs[index][1]) for index in wrapped],
        options,
    )
    for index, value in zip(wrapped, reduced, strict=True):
        results[index] = value
    return results


def _reduce_plain(extended: Combiner, op: ReduceOp, value: Any) -> Any:
    """Reduces a value that all replicas share: a mean is the value, a sum has no meaning."""
    is_zero = isinstance(value, (int, float)) and value == 0
    if op is ReduceOp.MEAN or extended.num_replicas_in_sync == 1 or is_zero:
        return value
    raise ValueError(
        f"reduce: {value!r} is one value that all {extended.num_replicas_in_sync} replicas share, "
        "not a value of each replica, so its sum over replicas is not defined. Reduce what "
        "strategy.run() returned, use dx.ReduceOp.MEAN, or multiply it yourself."
    )


def reduce_leaf(extended: Combiner, op: ReduceOp, value: object, axis: int | None) -> Any:
    """Reduces one value over replicas, and over a dimension of it if `axis` is given."""
    held = as_distributed(extended, value)
    if axis is None:
        (result,) = batch(extended, op, [(held, None)], None)
        return result.get() if isinstance(result, Mirrored) else result
    if not is_wrapped(held):
        _check_axis(jnp.shape(held), axis)
        total = (jnp.mean if op is ReduceOp.MEAN else jnp.sum)(held, axis=axis)
        return _reduce_plain(extended, op, total)
    sums, count = _axis_sums(held, axis)
    (total,) = batch(extended, ReduceOp.SUM, [(sums, None)], None)
    return total.get() / count if op is ReduceOp.MEAN else total.get()


def _axis_sums(value: DistributedValues, axis: int) -> tuple[DistributedValues, int]:
    """Returns each replica's sum along `axis`, and how many elements were added in all."""
    layout = value.layout
    if isinstance(layout, Local):
        shape = jnp.shape(layout.value)
        _check_axis(shape, axis)
        total = PerReplica.of(Local(jnp.sum(layout.value, axis=axis), layout.mesh))
        shapes = layout.shapes or (shape,) * layout.mesh.size
        return total, sum(each[axis] for each in shapes)
    if isinstance(layout, Global) and not layout.stacked:
        count = 1 if layout.mirrored else layout.mesh.size
        whole = layout.array.shape
        shape = (whole[0] // count, *whole[1:]) if whole else ()
        _check_axis(shape, axis)
        program = _sum_program(layout.mesh, axis, layout.mirrored, len(shape) == 1)
        with launch_lock:
            sums = program(layout.array)
        kind = Global(sums, layout.mesh, stacked=len(shape) == 1)
        return PerReplica.of(kind), shape[axis] * layout.mesh.size
    if isinstance(layout, Padded):
        _check_axis(layout.shapes[0], axis)
        if len({_drop_axis(shape, axis) for shape in layout.shapes}) == 1:
            with launch_lock:
                sums = _padded_sum_program(layout.mesh, axis, layout.shapes)(layout.array)
            kind = Global(sums, layout.mesh, stacked=len(layout.shapes[0]) == 1)
            return PerReplica.of(kind), sum(shape[axis] for shape in layout.shapes)
    for piece in value.values:
        _check_axis(jnp.shape(piece), axis)
    parts = tuple(_sum_where_it_is(piece, axis) for piece in value.values)
    count = sum(jnp.shape(piece)[axis] for piece in value.values)
    mesh = layout.mesh if isinstance(layout, (Padded, Pieces)) else None
    if mesh is not None and mesh.is_multi_process:
        count = jax_private.sum_over_processes(count)
    return PerReplica.of(Pieces(parts, mesh)), count


@lru_cache(maxsize=512)
def _sum_program(
    mesh: Mesh, axis: int, mirrored: bool, to_scalar: bool
) -> Callable[[jax.Array], jax.Array]:
    def local(value: jax.Array) -> jax.Array:
        total = jnp.sum(jax_private.to_varying(value, REPLICA_AXIS), axis=axis)
        return total[None] if to_scalar else total

    split = PartitionSpec(REPLICA_AXIS)
    spec = PartitionSpec() if mirrored else split
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=split))


@lru_cache(maxsize=512)
def _padded_sum_program(
    mesh: Mesh, axis: int, shapes: tuple[tuple[int, ...], ...]
) -> Callable[[jax.Array], jax.Array]:
    distinct = list(dict.fromkeys(shapes))
    choices = [distinct.index(shape) for shape in shapes]

    def add_up(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        total = jnp.sum(cut_to(value, shape), axis=axis)
        return total[None] if len(shape) == 1 else total

    def local(value: jax.Array) -> list[jax.Array]:
        choice = jnp.asarray(choices)[jax.lax.axis_index(REPLICA_AXIS)]
        branches = [partial(add_up, shape=shape) for shape in distinct]
        return [jax.lax.switch(choice, branches, value)]

    split = PartitionSpec(REPLICA_AXIS)
    program = jax.jit(jax_private.shard_map(local, mesh, (split,), [split]))
    return lambda array: program(array)[0]


def _drop_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    axis %= len(shape)
    return shape[:axis] + shape[axis + 1 :]


def _sum_where_it_is(piece: jax.typing.ArrayLike, axis: int) -> jax.Array:
    if not isinstance(piece, jax.Array) or jax_private.is_tracer(piece):
        return jnp.sum(jnp.asarray(piece), axis=axis)
    with jax.default_device(next(iter(piece.devices()))):
        return jnp.sum(piece, axis=axis)


def _check_axis(shape: Sequence[int], axis: object) -> None:
    if isinstance(axis, bool) or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        hint = "; a scalar has no axis, use axis=None" if not len(shape) else ""
        raise ValueError(
            f"reduce: axis={axis!r} does not fit a value of shape {tuple(shape)} in each replica. "
            f"Expected None, or an int from {-len(shape)} to {len(shape) - 1}{hint}."
        )


def gather(
    extended: Combiner,
    value: object,
    destinations: object,
    axis: int,
    options: CommunicationOptions | None,
) -> Any:
    """Concatenates a value over replicas."""
    held = as_distributed(extended, value)
    if not is_wrapped(held):
        if extended.num_replicas_in_sync > 1:
            raise ValueError(
                f"gather: {held!r} is one value that all replicas share, not a value of each "
                "replica. Gather what strategy.run() returned, or a variable."
            )
        held = Mirrored([held])
    if extended.single:
        return extended.cross_device_ops.gather(held, None, axis, options).get()
    return extended.cross_device_ops.gather(held, destinations, axis, options)


def broadcast_first(extended: Combiner, value: DistributedValues) -> Any:
    """Returns replica 0's value to all replicas."""
    layout = value.layout
    if isinstance(layout, Local):
        return Mirrored.of(Local(take_first_replica(layout.value), layout.mesh))
    if frames.current() is not None:
        return mirror_in_program(extended, value.values[0])
    return extended.broadcast_to(value.values[0])


def mirror_in_program(extended: Combiner, value: jax.typing.ArrayLike) -> Mirrored:
    """Wraps a value that is the same everywhere, while a function is traced."""
    assert extended.mesh is not None
    value = jnp.asarray(value)
    if isinstance(frames.current(), frames.RunFrame):
        return Mirrored.of(Local(value, extended.mesh))
    return Mirrored.of(Global(value, extended.mesh, mirrored=True))


def merge_copies(extended: Combiner, results: list[Any], *, group: bool, mirrored: bool) -> Any:
    """Merges what the copies' updates have returned; a tuple of all of them without `group`."""
    merged = _merge(extended, results, mirrored)
    if group:
        return merged
    own = local_results(merged)
    return own if len(own) == len(results) else own * len(results)


def _merge(extended: Combiner, results: list[Any], mirrored: bool) -> Any:
    """Returns the results as one nest, mirrored like the variable if that is."""
    mesh = extended.mesh if extended.mesh is not None and extended.mesh.is_multi_process else None
    nest = regroup(results, mesh=None if mirrored or frames.current() is not None else mesh)
    if len(results) == 1 and mesh is None:
        return nest

    def wrap(leaf: jax.Array | PerReplica) -> object:
        if isinstance(leaf, PerReplica):
            return Mirrored.of(Pieces(leaf.values, mesh)) if mirrored else leaf
        if not jax_private.is_tracer(leaf):
            # The only copy here is one of several all the same, if there are other processes.
            only = isinstance(leaf, jax.Array) and len(results) == 1
            return Mirrored.of(Pieces((leaf,), mesh)) if only else leaf
        if mirrored:
            return mirror_in_program(extended, leaf)
        assert extended.mesh is not None
        return PerReplica.of(Local(leaf, extended.mesh))

    return jax.tree.map(wrap, nest, is_leaf=is_wrapped)


def local_results(value: object) -> tuple[Any, ...]:
    """Returns one nest for each replica of this process, or the value alone if it is shared."""
    if isinstance(value, Variable):
        return value.values
    if is_wrapped(value):
        return get_local_pieces(value.layout)
    leaves, tree = jax.tree.flatten(value, is_leaf=is_wrapped)
    pieces = [get_local_pieces(leaf.layout) if is_wrapped(leaf) else None for leaf in leaves]
    counts = [len(each) for each in pieces if each is not None]
    if not counts:
        return (value,)
    return tuple(
        jax.tree.unflatten(
            tree,
            [
                leaf if own is None else own[min(index, len(own) - 1)]
                for leaf, own in zip(leaves, pieces, strict=True)
            ],
        )
        for index in range(max(counts))
    )


def check_no_per_replica(nest: object) -> None:
    """Raises if an argument of an update differs per replica."""
    for leaf in jax.tree.leaves(nest, is_leaf=is_wrapped):
        if isinstance(leaf, PerReplica) and not isinstance(leaf, Mirrored):
            raise ValueError(
                f"update: an argument differs per replica: {leaf!r}. The copies of a mirrored "
                "variable must get the same update; reduce it first: "
                "strategy.extended.reduce_to('SUM', value, var)."
            )

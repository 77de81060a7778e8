"""Combining and unwrapping values, for all strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from distribax import contracts, jax_private
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.collectives.cross_device_ops import take_from_one_device
from distribax.collectives.indexed_rows import find_slices, reduce_slices, refuse_slices
from distribax.errors import HostMode, HostOnly
from distribax.execution import captured, frames
from distribax.strategies import idle_values
from distribax.topology import REPLICA_AXIS, launch_lock
from distribax.types import ReduceOp, is_integer
from distribax.values import (
    DistributedValues,
    Global,
    IndexedSlices,
    Local,
    Mirrored,
    Padded,
    PerReplica,
    Pieces,
    divide,
    find_dtype,
    find_sum_type,
    get_local_pieces,
    is_number,
    is_slices,
    is_wrapped,
    nests,
    regroup,
)
from distribax.values.layout import cut_to
from distribax.variables import Variable
from distribax.variables.context_rules import take_first_replica


class Combiner(contracts.Extended, Protocol):
    """What is asked of a strategy's extended interface here."""

    @property
    def cross_device_ops(self) -> CrossDeviceOps: ...


def as_distributed(extended: Combiner, value: object) -> Any:
    """Returns a variable's copies as a distributed value, and anything else as it is."""
    if isinstance(value, Variable) and not extended.single:
        value = value.distributed()
    mesh = extended.mesh
    if frames.current() is not None:
        return _lift(value, mesh) if is_wrapped(value) else value
    if mesh is None or not mesh.is_multi_process:
        return value
    if is_wrapped(value) and value.layout.mesh != mesh:
        # Made by hand, or by a strategy of this process: the other processes have theirs.
        return type(value).of(Pieces(value.values, mesh), value.idle)
    return value


def _lift(value: DistributedValues, mesh: Mesh | None) -> DistributedValues:
    """Returns a value as the function that is traced can compute with it."""
    lifted: DistributedValues = captured.lift(value)
    if mesh is not None and mesh.is_multi_process and lifted.layout.mesh != mesh:
        # Made by hand, or not one array: a program of this process would leave the others' out.
        raise HostOnly("the other processes have parts of a value", HostMode.EAGER)
    return lifted


def batch(
    extended: Combiner,
    op: ReduceOp,
    pairs: Sequence[tuple[object, object]],
    options: CommunicationOptions | None,
) -> list[Any]:
    """Reduces values to destinations; plain values follow the rules of `_reduce_plain`."""
    values = [as_distributed(extended, value) for value, _ in pairs]
    results: list[Any] = [None] * len(values)
    wrapped: list[int] = []
    for index, value in enumerate(values):
        slices = find_slices(value)
        if slices is not None:
            results[index] = _reduce_slices(extended, op, slices, pairs[index][1], options)
        elif is_wrapped(value):
            _check_numbers(value)
            wrapped.append(index)
        else:
            results[index] = _reduce_plain(extended, op, value)
    reduced = idle_values.reduce(
        extended.cross_device_ops,
        op,
        [(values[index], pairs[index][1]) for index in wrapped],
        options,
    )
    for index, value in zip(wrapped, reduced, strict=True):
        results[index] = value
    return results


def _check_numbers(value: DistributedValues) -> None:
    layout = value.layout
    others = [p for p in layout.pieces if not is_number(p)] if isinstance(layout, Pieces) else []
    if others:
        raise TypeError(
            f"reduce: a replica's value is {others[0]!r:.200}, not an array of numbers. Wrap the "
            "arrays one by one, {'loss': dx.PerReplica([...])}, not nests of them, and take other "
            "values apart with strategy.experimental_local_results(x)."
        )


def _reduce_slices(
    extended: Combiner,
    op: ReduceOp,
    slices: IndexedSlices,
    destinations: object,
    options: CommunicationOptions | None,
) -> IndexedSlices:
    def join(part: DistributedValues) -> Any:
        joined = extended.gather_to(part, destinations, 0, options)
        return take_from_one_device(joined, destinations)

    return reduce_slices(op, slices, join)


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


def reduce_leaf(
    extended: Combiner, op: ReduceOp, value: object, axis: int | Sequence[int] | None
) -> Any:
    """Reduces one value over replicas, and over dimensions of it if `axis` is given."""
    held = as_distributed(extended, value)
    if axis is None:
        (result,) = batch(extended, op, [(held, None)], None)
        if is_slices(result) and result is not held:
            return IndexedSlices(_take(result.values), _take(result.indices), result.dense_shape)
        return _take(result)
    if find_slices(held) is not None:
        return _reduce_rows(extended, op, held, axis)
    if not is_wrapped(held):
        held = jnp.asarray(held)
        axes = _check_axis(jnp.shape(held), axis)
        total = (jnp.mean if op is ReduceOp.MEAN else jnp.sum)(held, axis=axes)
        return _reduce_plain(extended, op, total)
    dtype = find_dtype(held.layout)
    sums, count = _sum_along(held, axis, find_sum_type(dtype) if op is ReduceOp.MEAN else None)
    (total,) = batch(extended, ReduceOp.SUM, [(sums, None)], None)
    return divide(total.get(), count, dtype) if op is ReduceOp.MEAN else total.get()


def _take(result: Any) -> Any:
    return result.get() if isinstance(result, Mirrored) else result


def _reduce_rows(
    extended: Combiner, op: ReduceOp, slices: object, axis: int | Sequence[int]
) -> jax.Array:
    """Reduces rows with numbers along dimensions of the array that they are rows of."""
    total = jnp.asarray(reduce_leaf(extended, ReduceOp.SUM, slices, None))
    axes = _check_axis(total.shape, axis)
    summed = jnp.sum(total, axis=axes)
    if op is ReduceOp.SUM:
        return summed
    return summed / (_count(total.shape, axes) * extended.num_replicas_in_sync)


def _sum_along(
    value: DistributedValues, axis: int | Sequence[int], dtype: np.dtype[Any] | None
) -> tuple[DistributedValues, int]:
    """Returns each replica's sum along `axis`, and how many elements were added in all.

    The sums are of type `dtype`; None is for that of `jnp.sum`.
    """
    layout = value.layout
    if isinstance(layout, Local):
        axes = _check_axis(jnp.shape(layout.value), axis)
        total = PerReplica.of(Local(jnp.sum(layout.value, axis=axes, dtype=dtype), layout.mesh))
        return total, sum(_count(shape, axes) for shape in value.shapes())
    if isinstance(layout, Padded) or (isinstance(layout, Global) and not layout.stacked):
        shapes = _list_shapes(layout)
        axes = _check_axis(shapes[0], axis)
        if len({_drop_axes(shape, axes) for shape in shapes}) == 1:
            with launch_lock, jax_private.leave_mesh():
                sums = _sum_program(layout.mesh, axes, shapes, layout.spec, dtype)(layout.array)
            kind = Global(sums, layout.mesh, stacked=len(axes) == len(shapes[0]))
            return PerReplica.of(kind), sum(_count(shape, axes) for shape in shapes)
    shapes = tuple(jnp.shape(piece) for piece in value.values)
    parts = tuple(
        jax_private.call_near(partial(jnp.sum, axis=_check_axis(shape, axis), dtype=dtype), piece)
        for piece, shape in zip(value.values, shapes, strict=True)
    )
    count = sum(_count(shape, _check_axis(shape, axis)) for shape in shapes)
    mesh = layout.mesh if isinstance(layout, (Padded, Pieces)) else None
    if mesh is not None and mesh.is_multi_process:
        count = jax_private.sum_over_processes(count)
    return PerReplica.of(Pieces(parts, mesh)), count


def _count(shape: Sequence[int], axes: Sequence[int]) -> int:
    """Returns how many elements are added along some dimensions."""
    return math.prod(shape[axis] for axis in axes)


def _list_shapes(layout: Global | Padded) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of each replica's value."""
    if isinstance(layout, Padded):
        return layout.shapes
    shape = layout.array.shape
    if shape and not layout.mirrored:
        shape = (shape[0] // layout.mesh.size, *shape[1:])
    return (shape,) * layout.mesh.size


@lru_cache(maxsize=512)
def _sum_program(
    mesh: Mesh,
    axes: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    spec: PartitionSpec,
    dtype: np.dtype[Any] | None,
) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that adds up along `axes` each replica's value, which may be padded."""
    distinct = list(dict.fromkeys(shapes))
    choices = [distinct.index(shape) for shape in shapes]

    def add_up(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        total = jnp.sum(cut_to(value, shape), axis=axes, dtype=dtype)
        return total[None] if len(shape) == len(axes) else total

    def local(value: jax.Array) -> list[jax.Array]:
        choice = jnp.asarray(choices)[jax.lax.axis_index(REPLICA_AXIS)]
        branches = [partial(add_up, shape=shape) for shape in distinct]
        return [jax.lax.switch(choice, branches, value)]

    split = PartitionSpec(REPLICA_AXIS)
    program = jax.jit(jax_private.shard_map(local, mesh, (spec,), [split]))
    return lambda array: program(array)[0]


def _drop_axes(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for dim, size in enumerate(shape) if dim not in axes)


def _check_axis(shape: Sequence[int], axis: object) -> tuple[int, ...]:
    """Returns the dimensions that `axis` names, counted from the first."""
    rank = len(shape)
    given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for each in given:
        if jax_private.is_tracer(each):
            raise ValueError(
                "reduce: axis is a number that was given to a dx.function, and so is not known "
                "while the function is traced. Name it static: dx.function(static_argnames='axis')."
            )
        if not is_integer(each) or not -rank <= each < rank:
            hint = "; a scalar has no axis, use axis=None" if not rank else ""
            raise ValueError(
                f"reduce: axis={axis!r} does not fit a value of shape {tuple(shape)} in each "
                f"replica. Expected None, an int from {-rank} to {rank - 1}, or a tuple of "
                f"them{hint}."
            )
    axes = tuple(int(each) % rank for each in given)
    if len(set(axes)) < len(axes):
        raise ValueError(f"reduce: axis={axis!r} names a dimension twice. Name each once.")
    return axes


def gather(
    extended: Combiner,
    value: object,
    destinations: object,
    axis: int,
    options: CommunicationOptions | None,
) -> Any:
    """Concatenates a value over replicas."""
    held = as_distributed(extended, value)
    refuse_slices(held, "gather")
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

    return nests.map_leaves(wrap, nest, is_wrapped)


def local_results(value: object) -> tuple[Any, ...]:
    """Returns one nest for each replica of this process, or the value alone if it is shared."""
    if isinstance(value, Variable):
        return value.values
    if is_wrapped(value):
        return get_local_pieces(captured.lift(value).layout)
    leaves, tree = nests.flatten(value, is_wrapped)
    pieces = [
        get_local_pieces(captured.lift(leaf).layout) if is_wrapped(leaf) else None
        for leaf in leaves
    ]
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
    for leaf in nests.flatten(nest, is_wrapped)[0]:
        if isinstance(leaf, PerReplica):
            raise ValueError(
                f"update: an argument differs per replica: {leaf!r}. The copies of a mirrored "
                "variable must get the same update; reduce it first: "
                "strategy.extended.reduce_to('SUM', value, var)."
            )

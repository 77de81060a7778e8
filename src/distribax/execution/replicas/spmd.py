"""Compiled replicas: one SPMD program over the mesh, traced once whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distribax import context, jax_private
from distribax.collectives import CrossDeviceOps
from distribax.errors import HostMode, HostOnly
from distribax.execution import frames
from distribax.topology import REPLICA_AXIS
from distribax.types import Args, Kwargs, ReduceOp, StepFn
from distribax.values import (
    DistributedValues,
    Global,
    Local,
    Mirrored,
    Origins,
    PerReplica,
    is_none_wrapped_or_opaque,
    is_wrapped_or_opaque,
)

_SPLIT = PartitionSpec(REPLICA_AXIS)
_SAME = PartitionSpec()
_T = TypeVar("_T")


class SpmdRunner:
    """The meeting points of replicas that are one program: collectives over the mesh axis."""

    compiles = False
    copy_id = 0

    def __init__(
        self, strategy: Any, frame: frames.RunFrame, ops: CrossDeviceOps, origins: Origins
    ) -> None:
        self.strategy = strategy
        self.frame = frame
        self.mesh = frame.mesh
        self.ops = ops
        self.origins = origins

    @property
    def replica_id(self) -> Any:
        return lax.axis_index(REPLICA_AXIS)

    def create_variable(self, create: Callable[[], _T], place: str) -> _T:
        return create()

    def merge(self, fn: StepFn, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = jax.tree.map(self.wrap, (args, kwargs), is_leaf=is_wrapped_or_opaque)
        with context.enter(context.Entry(self.strategy)):
            result = fn(self.strategy, *args, **kwargs)
        return jax.tree.map(self._given_back, result, is_leaf=is_wrapped_or_opaque)

    def all_reduce(self, op: ReduceOp, leaves: list[Any], options: Any) -> list[Any]:
        values = [jnp.asarray(leaf) for leaf in leaves]
        options = options or self.ops.default_options
        reduced = self.ops.all_reduce_in_program(op, values, self.mesh, options)
        return [self.frame.give_shared(value) for value in reduced]

    def all_gather(self, leaves: list[Any], axis: int, options: Any) -> list[Any]:
        return [
            self.frame.give_shared(
                jax_private.all_gather_joined(jnp.asarray(leaf), REPLICA_AXIS, axis)
            )
            for leaf in leaves
        ]

    def wrap(self, leaf: Any) -> Any:
        """Returns a replica's value as the values of all replicas."""
        if not jax_private.is_tracer(leaf):
            return leaf
        whole = self.origins.whole([leaf])
        if whole is not None:
            return whole
        value, shared = self.frame.find_shared(leaf)
        if self.frame.is_bare(leaf):
            return value
        if self.mesh.size == 1:
            return value
        return (Mirrored if shared else PerReplica).of(Local(value, self.mesh))

    def _given_back(self, leaf: Any) -> Any:
        """Returns a replica's part of what a merge function has returned."""
        if is_wrapped_or_opaque(leaf):
            return self.unwrap(leaf)
        # Outside the replicas there is one value for all of them.
        return self.frame.give_shared(leaf, bare=True)

    def unwrap(self, leaf: Any) -> Any:
        """Returns the replica's own part of a wrapped value."""
        if not isinstance(leaf, DistributedValues):
            return leaf
        layout = leaf.layout
        if isinstance(leaf, Mirrored):
            return self.frame.give_shared(leaf.get())
        if isinstance(layout, Local):
            return layout.value
        if self.mesh.is_multi_process:
            raise HostOnly("a value of this process's replicas is a constant", HostMode.EAGER)
        pieces = leaf.values
        return jax.tree.map(lambda *p: jnp.stack(p)[self.replica_id], *pieces)


def run_in_program(
    strategy: Any, mesh: Mesh, ops: CrossDeviceOps, fn: StepFn, args: Args, kwargs: Kwargs
) -> Any:
    """Runs `fn` for all replicas inside the `dx.function` that is being traced."""
    outer = frames.current()
    assert outer is not None
    if isinstance(outer, frames.RunFrame):
        return _run_inside(strategy, outer, ops, fn, args, kwargs)
    return _run(strategy, outer, mesh, ops, fn, args, kwargs)


def _run_inside(
    strategy: Any,
    frame: frames.RunFrame,
    ops: CrossDeviceOps,
    fn: StepFn,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs `fn` for all replicas from a merge function, which is in their program already."""
    runner = SpmdRunner(strategy, frame, ops, Origins())
    args, kwargs = jax.tree.map(
        runner.unwrap, (tuple(args), dict(kwargs)), is_leaf=is_wrapped_or_opaque
    )
    with context.enter(context.Entry(strategy, context.ReplicaContext(strategy, runner))):
        result = fn(*args, **kwargs)
    return jax.tree.map(runner.wrap, result, is_leaf=is_wrapped_or_opaque)


def _run(
    strategy: Any,
    outer: frames.Frame,
    mesh: Mesh,
    ops: CrossDeviceOps,
    fn: StepFn,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    outer.function.mesh = mesh
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_wrapped_or_opaque)
    given = [_input(leaf, mesh) for leaf in leaves]
    inputs = [value for value, _, _ in given if value is not None]
    in_specs = [spec for value, spec, _ in given if value is not None]
    # Read outside, as the replicas' values cannot be reached from inside; used or not.
    stacked = [
        variable
        for variable in outer.function.lifted
        if variable.per_replica and variable.sharding == NamedSharding(mesh, _SPLIT)
    ]
    stacked_values = [outer.values[variable] for variable in stacked]
    out_specs: list[PartitionSpec] = []
    plan: list[Any] = []
    written: list[Any] = []
    result_tree: list[Any] = []

    def body(local_inputs: list[Any], local_stacked: list[Any]) -> list[Any]:
        origins = Origins()
        local = dict(zip(stacked, (value[0] for value in local_stacked), strict=True))
        frame = frames.RunFrame(outer, mesh, local)
        runner = SpmdRunner(strategy, frame, ops, origins)
        replica = context.ReplicaContext(strategy, runner)
        remaining = iter(local_inputs)
        local_leaves = [
            leaf if value is None else _enter(next(remaining), leaf, layout, origins)
            for leaf, (value, _, layout) in zip(leaves, given, strict=True)
        ]
        local_args, local_kwargs = jax.tree.unflatten(tree, local_leaves)
        with frames.enter(frame), context.enter(context.Entry(strategy, replica)):
            result = fn(*local_args, **local_kwargs)
        flat, tree_out = jax.tree.flatten(result, is_leaf=is_none_wrapped_or_opaque)
        result_tree[:] = [tree_out]
        outputs = _outputs([runner.unwrap(leaf) for leaf in flat], runner, plan, out_specs)
        written[:] = list(frame.written)
        for variable in written:
            value = frame.values[variable]
            outputs.append(value[None] if variable.per_replica else value)
            out_specs.append(_SPLIT if variable.per_replica else _SAME)
        return outputs

    program = jax_private.shard_map(body, mesh, (in_specs, [_SPLIT] * len(stacked)), out_specs)
    outputs = program(inputs, stacked_values)
    results = iter(outputs)
    merged = [
        item if kind is None else _merged(kind, Global(next(results), mesh, *item))
        for kind, item in plan
    ]
    for variable in written:
        outer.write(variable, next(results))
    return jax.tree.unflatten(result_tree[0], merged)


def _merged(kind: Any, layout: Global) -> Any:
    """Wraps a result, unless it is one value: of all replicas, or of the only one."""
    return layout.piece(0) if kind is jax.Array or layout.mesh.size == 1 else kind.of(layout)


def _input(leaf: Any, mesh: Mesh) -> tuple[Any, PartitionSpec, Global | None]:
    """Returns the array to feed for an argument (None if it is no array), its spec and layout."""
    if isinstance(leaf, DistributedValues):
        layout = leaf.on_mesh(mesh)
        if layout is None and isinstance(leaf, Mirrored):
            return leaf.get(), _SAME, None
        if layout is None:
            raise HostOnly("the replicas' pieces of an argument differ in shape", HostMode.EAGER)
        if not jax_private.is_local(layout.array):
            # JAX makes no constant of an array over several processes.
            raise HostOnly("a distributed value is no argument of the function", HostMode.EAGER)
        return layout.array, layout.spec, layout
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf, _SAME, None
    return None, _SAME, None


def _enter(value: Any, leaf: Any, layout: Global | None, origins: Origins) -> Any:
    """Gives a replica its part of an argument."""
    if layout is not None and layout.stacked:
        value = value[0]
    if layout is not None and not layout.mirrored:
        return value
    return origins.note(value, leaf, 0)


def _outputs(
    flat: list[Any], runner: SpmdRunner, plan: list[Any], out_specs: list[PartitionSpec]
) -> list[Any]:
    """Sorts results into arrays of the program and objects that stay as they are."""
    outputs: list[Any] = []
    plan.clear()
    out_specs.clear()
    for leaf in flat:
        if not jax_private.is_tracer(leaf):
            plan.append((None, leaf))
            continue
        whole = runner.origins.whole([leaf])
        value, shared = runner.frame.find_shared(leaf)
        if whole is not None:
            plan.append((None, whole))
        elif shared:
            kind = jax.Array if runner.frame.is_bare(leaf) else Mirrored
            plan.append((kind, (False, True)))
            outputs.append(value)
            out_specs.append(_SAME)
        else:
            scalar = value.ndim == 0
            plan.append((PerReplica, (scalar, False)))
            outputs.append(value[None] if scalar else value)
            out_specs.append(_SPLIT)
    return outputs

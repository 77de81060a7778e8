"""Compiled replicas: one SPMD program over the mesh, traced once whatever their number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distribax import context, contracts, jax_private
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.errors import HostMode, HostOnly
from distribax.execution import frames
from distribax.execution.replicas.outcome import SAME, SPLIT, Bare, Outcome, Part
from distribax.execution.replicas.uneven import run_uneven
from distribax.execution.results import Held
from distribax.execution.variant import Variant
from distribax.topology import REPLICA_AXIS
from distribax.types import ReduceOp
from distribax.values import (
    Global,
    GlobalForm,
    Local,
    Mirrored,
    Origins,
    Padded,
    PaddedForm,
    PerReplica,
    is_none_wrapped_or_opaque,
    is_wrapped,
    is_wrapped_or_opaque,
    reduce_without_idle,
)
from distribax.values.layout import cut_to, gather_joined

_T = TypeVar("_T")


class SpmdRunner:
    """The meeting points of replicas that are one program: collectives over the mesh axis."""

    compiles = False
    copy_id = 0

    def __init__(
        self,
        strategy: contracts.Strategy,
        frame: frames.RunFrame,
        ops: CrossDeviceOps,
        origins: Origins,
    ) -> None:
        self.strategy = strategy
        self.frame = frame
        self.mesh = frame.mesh
        self.ops = ops
        self.origins = origins

    @property
    def replica_id(self) -> jax.Array:
        return lax.axis_index(REPLICA_AXIS)

    @property
    def is_idle(self) -> bool:
        return self.frame.variant is not None and self.frame.variant.is_idle

    def create_variable(self, create: Callable[[], _T], place: str) -> _T:
        return create()

    def merge(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        args, kwargs = jax.tree.map(self.wrap, (args, kwargs), is_leaf=is_wrapped_or_opaque)
        with context.enter(context.Entry(self.strategy)):
            result = fn(self.strategy, *args, **kwargs)
        return jax.tree.map(self._give_back, result, is_leaf=is_wrapped_or_opaque)

    def all_reduce(
        self, op: ReduceOp, leaves: list[jax.Array], options: CommunicationOptions | None
    ) -> list[jax.Array]:
        values = [jnp.asarray(leaf) for leaf in leaves]
        options = options or self.ops.default_options
        reduce = functools.partial(self.ops.all_reduce_in_program, mesh=self.mesh, options=options)
        reduced = reduce_without_idle(
            op, values, reduce, self.frame.idle.find(), is_idle=self.is_idle
        )
        return [self.frame.give_shared(value) for value in reduced]

    def all_gather(
        self, leaves: list[jax.Array], axis: int, options: CommunicationOptions | None
    ) -> list[jax.Array]:
        return [
            self.frame.give_shared(gather_joined(self._wrap_local(jnp.asarray(leaf)), axis))
            for leaf in leaves
        ]

    def _wrap_local(self, value: jax.Array) -> Local:
        variant = self.frame.variant
        shapes = None if variant is None else variant.find_shapes(jnp.shape(value))
        return Local(value, self.mesh, shapes)

    def wrap(self, leaf: object) -> Any:
        """Returns a replica's value as the values of all replicas."""
        if not jax_private.is_tracer(leaf):
            return leaf
        whole = self.origins.find_whole([leaf])
        if whole is not None:
            return whole
        value, shared = self.frame.find_shared(leaf)
        if self.frame.is_bare(leaf):
            return value
        if self.mesh.size == 1:
            return value
        if shared:
            return Mirrored.of(Local(value, self.mesh))
        return PerReplica.of(self._wrap_local(value), self.frame.idle)

    def _give_back(self, leaf: object) -> Any:
        """Returns a replica's part of what a merge function has returned."""
        if is_wrapped_or_opaque(leaf):
            return self.unwrap(leaf)
        # Outside the replicas there is one value for all of them.
        return self.frame.give_shared(leaf, bare=True)

    def unwrap(self, leaf: object) -> Any:
        """Returns the replica's own part of a wrapped value."""
        if not is_wrapped(leaf):
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
    strategy: contracts.Strategy,
    mesh: Mesh,
    ops: CrossDeviceOps,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Any:
    """Runs `fn` for all replicas inside the `dx.function` that is being traced."""
    outer = frames.current()
    assert outer is not None
    if isinstance(outer, frames.RunFrame):
        return _run_inside(strategy, outer, ops, fn, args, kwargs)
    return _run(strategy, outer, mesh, ops, fn, args, kwargs)


def _run_inside(
    strategy: contracts.Strategy,
    frame: frames.RunFrame,
    ops: CrossDeviceOps,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
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
    strategy: contracts.Strategy,
    outer: frames.Frame,
    mesh: Mesh,
    ops: CrossDeviceOps,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Any:
    outer.function.mesh = mesh
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_wrapped_or_opaque)
    given = [_make_input(leaf, mesh) for leaf in leaves]
    inputs = [each.array for each in given if each is not None]
    in_specs = [each.spec for each in given if each is not None]
    # Read outside, as the replicas' values cannot be reached from inside; used or not.
    stacked = [
        variable
        for variable in outer.function.lifted
        if variable.per_replica and variable.program_sharding == NamedSharding(mesh, SPLIT)
    ]
    stacked_values = [outer.values[variable] for variable in stacked]
    out_specs: list[PartitionSpec] = []
    outcome: Outcome

    def call(
        local_inputs: Sequence[jax.Array],
        local_stacked: Sequence[jax.Array],
        variant: Variant | None,
    ) -> Outcome:
        origins = Origins()
        local = dict(zip(stacked, (value[0] for value in local_stacked), strict=True))
        frame = frames.RunFrame(outer, mesh, local, variant)
        runner = SpmdRunner(strategy, frame, ops, origins)
        replica = context.ReplicaContext(strategy, runner)
        remaining = iter(local_inputs)
        local_leaves = [
            leaf if each is None else _enter(next(remaining), leaf, each.layout, origins, variant)
            for leaf, each in zip(leaves, given, strict=True)
        ]
        local_args, local_kwargs = jax.tree.unflatten(tree, local_leaves)
        with frames.enter(frame), context.enter(context.Entry(strategy, replica)):
            result = fn(*local_args, **local_kwargs)
        flat, result_tree = jax.tree.flatten(result, is_leaf=is_none_wrapped_or_opaque)
        plan, outputs = _sort([runner.unwrap(leaf) for leaf in flat], runner)
        # What another variant writes is written here too, with the value that it has.
        required = {} if variant is None else variant.known.written
        written = list(dict.fromkeys((*required, *frame.written)))
        for variable in written:
            value = frame.read(variable)
            outputs.append(value[None] if variable.per_replica else value)
        return Outcome(result_tree, plan, written, outputs)

    def body(local_inputs: list[jax.Array], local_stacked: list[jax.Array]) -> list[jax.Array]:
        nonlocal outcome
        layouts = [each.layout for each in given if each is not None]
        padded = [layout for layout in layouts if isinstance(layout, Padded)]
        if padded:
            outcome = run_uneven(call, local_inputs, local_stacked, padded, mesh)
        else:
            outcome = call(local_inputs, local_stacked, None)
        # Filled, not replaced: JAX reads the list after it has traced this function.
        out_specs[:] = outcome.specs
        return outcome.outputs

    program = jax_private.shard_map(body, mesh, (in_specs, [SPLIT] * len(stacked)), out_specs)
    outputs = program(inputs, stacked_values)
    results = iter(outputs)
    merged = [
        part.value if isinstance(part, Held) else _merge(part, next(results))
        for part in outcome.plan
    ]
    for variable in outcome.written:
        outer.write(variable, next(results))
    return jax.tree.unflatten(outcome.tree, merged)


def _merge(part: Bare | GlobalForm | PaddedForm, array: jax.Array) -> Any:
    """Wraps a result, unless it is one value: of all replicas, or of the only one."""
    if isinstance(part, Bare):
        return array
    wrapped = part.wrap(array)
    return wrapped.part(0) if part.mesh.size == 1 else wrapped


@dataclass(frozen=True)
class _Input:
    """An argument as the program takes it."""

    array: jax.Array | np.ndarray
    spec: PartitionSpec
    layout: Global | Padded | None


def _make_input(leaf: object, mesh: Mesh) -> _Input | None:
    """Returns what to feed for an argument; None if it is no array."""
    if is_wrapped(leaf):
        layout: Global | Padded | None = leaf.on_mesh(mesh)
        if layout is None and isinstance(leaf, Mirrored):
            return _Input(leaf.get(), SAME, None)
        layout = layout or leaf.pad(mesh)
        if layout is None:
            raise HostOnly("the pieces of an argument cannot be one array", HostMode.EAGER)
        if not jax_private.is_local(layout.array):
            # JAX makes no constant of an array over several processes.
            raise HostOnly("a distributed value is no argument of the function", HostMode.EAGER)
        return _Input(layout.array, layout.spec, layout)
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return _Input(leaf, SAME, None)
    return None


def _enter(
    value: jax.Array,
    leaf: object,
    layout: Global | Padded | None,
    origins: Origins,
    variant: Variant | None,
) -> jax.Array:
    """Gives a replica its part of an argument."""
    if isinstance(layout, Padded):
        assert variant is not None
        return cut_to(value, layout.shapes[variant.replica_id])
    if layout is not None and layout.stacked:
        value = value[0]
    if layout is not None and not layout.mirrored:
        return value
    return origins.note(value, leaf, 0)


def _sort(flat: Sequence[object], runner: SpmdRunner) -> tuple[list[Part], list[jax.Array]]:
    """Sorts results into objects that stay as they are and arrays of the program."""
    plan: list[Part] = []
    outputs: list[jax.Array] = []
    for leaf in flat:
        if not jax_private.is_tracer(leaf):
            plan.append(Held(leaf))
            continue
        whole = runner.origins.find_whole([leaf])
        value, shared = runner.frame.find_shared(leaf)
        if whole is not None:
            plan.append(Held(whole))
        elif shared:
            bare = runner.frame.is_bare(leaf)
            plan.append(Bare() if bare else GlobalForm(Mirrored, runner.mesh, False, True))
            outputs.append(value)
        else:
            scalar = value.ndim == 0
            idle = runner.frame.idle.find()
            plan.append(GlobalForm(PerReplica, runner.mesh, scalar, False, idle))
            outputs.append(value[None] if scalar else value)
    return plan, outputs

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
from jax.tree_util import PyTreeDef

from distribax import context, contracts, jax_private
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.errors import HostMode, HostOnly, NeedsOwnMesh
from distribax.execution.calls.call import name_leaves
from distribax.execution.programs.results import Held, hold
from distribax.execution.replicas.outcome import SAME, SPLIT, Bare, Outcome, Part
from distribax.execution.replicas.uneven import run_uneven
from distribax.execution.traces import captured, frames, trace_errors
from distribax.execution.traces.variant import Variant
from distribax.topology import REPLICA_AXIS
from distribax.types import ReduceOp
from distribax.values import (
    Global,
    GlobalForm,
    IndexedSlices,
    Local,
    Mirrored,
    Origins,
    Padded,
    PaddedForm,
    PerReplica,
    is_none_wrapped_or_opaque,
    is_slices,
    is_wrapped,
    is_wrapped_or_opaque,
    nests,
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
        # Whether the code has asked for the index of its replica.
        self.uses_replica_id = False

    @property
    def replica_id(self) -> jax.Array:
        self.uses_replica_id = True
        return lax.axis_index(REPLICA_AXIS)

    @property
    def is_idle(self) -> bool:
        return self.frame.variant is not None and self.frame.variant.is_idle

    def create_variable(self, create: Callable[[], _T], place: str) -> _T:
        return create()

    def merge(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        args, kwargs = nests.map_leaves(self.wrap, (args, kwargs), _is_unit)
        with context.enter(context.Entry(self.strategy)):
            result = fn(self.strategy, *args, **kwargs)
        return nests.map_leaves(self._give_back, result, is_wrapped_or_opaque)

    def call_together(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        alone: Callable[..., object],
    ) -> Any:
        return alone(*args, **kwargs)

    def all_reduce(
        self, op: ReduceOp, leaves: list[jax.Array], options: CommunicationOptions | None
    ) -> list[jax.Array]:
        values = [jnp.asarray(leaf) for leaf in leaves]
        if self.mesh.size == 1:
            # Its value is the sum and the mean, of the same type, as in eager code.
            return [self.frame.give_shared(value) for value in values]
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
        if is_slices(leaf):
            own = self.own_slices(leaf)
            return IndexedSlices(self.wrap(own.values), self.wrap(own.indices), own.dense_shape)
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

    def own_slices(self, slices: IndexedSlices) -> IndexedSlices:
        """Returns rows and numbers that are both known to be shared, or both the replica's own."""
        parts = (slices.values, slices.indices)
        if all(self.origins.find_whole([part]) is not None for part in parts):
            return slices
        if all(self.frame.is_shared(part) for part in parts):
            return slices
        values, indices = (jnp.copy(jnp.asarray(part)) for part in parts)
        return IndexedSlices(values, indices, slices.dense_shape)

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
        return captured.read_in_program(leaf, self.frame)


def _is_unit(leaf: object) -> bool:
    return is_wrapped_or_opaque(leaf) or is_slices(leaf)


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
    args, kwargs = nests.map_leaves(
        runner.unwrap, (tuple(args), dict(kwargs)), is_wrapped_or_opaque
    )
    with context.enter(context.Entry(strategy, context.ReplicaContext(strategy, runner))):
        result = fn(*args, **kwargs)
    return nests.map_leaves(runner.wrap, result, _is_unit)


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
    if jax_private.has_mesh():
        raise NeedsOwnMesh
    leaves, tree = nests.flatten((tuple(args), dict(kwargs)), is_wrapped_or_opaque)
    given = [_make_input(leaf, mesh) for leaf in leaves]
    inputs = [each.array for each in given if each is not None]
    in_specs = [each.spec for each in given if each is not None]
    # All of them, as the replicas' values cannot be reached from inside.
    stacked = frames.per_replica_states.find(NamedSharding(mesh, SPLIT))
    stacked_values = [outer.function.lift(variable) for variable in stacked]
    found = captured.find_known(outer.function, mesh)
    found_values = [outer.function.lift(state) for state in found]
    entering = [
        *zip(inputs, in_specs, strict=True),
        *((value, SPLIT) for value in stacked_values),
        *zip(found_values, (state.layout.spec for state in found), strict=True),
    ]
    out_specs: list[PartitionSpec] = []
    outcome: Outcome

    def call(
        local_inputs: Sequence[jax.Array],
        local_states: Sequence[jax.Array],
        variant: Variant | None,
    ) -> Outcome:
        origins = Origins()
        values = iter(local_states)
        local: dict[contracts.State, Any] = {variable: next(values)[0] for variable in stacked}
        for state in found:
            local[state] = state.take_local(next(values))
        frame = frames.RunFrame(outer, mesh, local, entering, variant)
        runner = SpmdRunner(strategy, frame, ops, origins)
        replica = context.ReplicaContext(strategy, runner)
        remaining = iter(local_inputs)
        local_leaves = [
            leaf if each is None else _enter(next(remaining), leaf, each.layout, origins, variant)
            for leaf, each in zip(leaves, given, strict=True)
        ]
        local_args, local_kwargs = jax.tree.unflatten(tree, local_leaves)
        explained = trace_errors.explain(lambda: runner.uses_replica_id)
        with explained, frames.enter(frame), context.enter(context.Entry(strategy, replica)):
            result = fn(*local_args, **local_kwargs)
        flat, result_tree = _flatten_results(result, runner)
        own = [leaf if _is_found(leaf) else runner.unwrap(leaf) for leaf in flat]
        plan, outputs = _sort(own, runner)
        # What another variant writes is written here too, with the value that it has.
        required = {} if variant is None else variant.known.written
        written = list(dict.fromkeys((*required, *frame.written)))
        for variable in written:
            value = frame.read(variable)
            outputs.append(value[None] if variable.per_replica else value)
        return Outcome(result_tree, plan, written, outputs)

    def body(
        local_inputs: list[jax.Array],
        local_stacked: list[jax.Array],
        local_found: list[jax.Array],
    ) -> list[jax.Array]:
        nonlocal outcome
        layouts = [each.layout for each in given if each is not None]
        padded = [layout for layout in layouts if isinstance(layout, Padded)]
        local_states = [*local_stacked, *local_found]
        if padded:
            outcome = run_uneven(call, local_inputs, local_states, padded, mesh)
        else:
            outcome = call(local_inputs, local_states, None)
        # Filled, not replaced: JAX reads the list after it has traced this function.
        out_specs[:] = outcome.specs
        return outcome.outputs

    called = name_leaves(fn, args, kwargs, is_wrapped_or_opaque)
    paired = zip(called, given, strict=False)  # JAX does not know all of the containers.
    names = [name for name, each in paired if each is not None]
    names += [state.described for state in (*stacked, *found)]
    # JAX's errors then name the replica's function and its arguments.
    jax_private.set_description(body, jax_private.describe("strategy.run", fn, names))
    all_specs = (in_specs, [SPLIT] * len(stacked), [state.layout.spec for state in found])
    program = jax_private.shard_map(body, mesh, all_specs, out_specs)
    outputs = program(inputs, stacked_values, found_values)
    results = iter(outputs)
    merged = [
        part.value if isinstance(part, Held) else _merge(part, next(results))
        for part in outcome.plan
    ]
    for variable in outcome.written:
        outer.write(variable, next(results))
    return jax.tree.unflatten(outcome.tree, merged)


def _flatten_results(result: object, runner: SpmdRunner) -> tuple[list[Any], PyTreeDef]:
    flat, tree = nests.flatten(result, lambda leaf: leaf is None or _is_unit(leaf))
    if any(map(is_slices, flat)):
        own = [runner.own_slices(leaf) if is_slices(leaf) else leaf for leaf in flat]
        result = jax.tree.unflatten(tree, own)
        return nests.flatten(result, is_none_wrapped_or_opaque)
    return flat, tree


def _is_found(leaf: object) -> bool:
    """Tells whether a result is a value of all replicas that the code has found as it is."""
    if not isinstance(leaf, Mirrored) or isinstance(leaf.layout, Local):
        return False
    return not jax_private.is_tracer(leaf.get())


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
        # What one process has made by hand cannot be a part of the program of all.
        is_known = leaf.layout.mesh == mesh or not mesh.is_multi_process
        layout: Global | Padded | None = None
        if is_known:
            lifted = captured.lift(leaf, mesh)
            layout = lifted.on_mesh(mesh)
            if layout is None and isinstance(leaf, Mirrored):
                return _Input(leaf.get(), SAME, None)
            layout = layout or lifted.pad(mesh)
        if layout is None:
            raise HostOnly("the pieces of an argument cannot be one array", HostMode.EAGER)
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
            plan.append(hold(leaf))
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

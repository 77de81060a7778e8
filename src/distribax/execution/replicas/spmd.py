"""Compiled replicas: one SPMD program over the mesh, traced once whatever their number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.errors import HostMode, HostOnly, NeedsOwnMesh
from distribax.execution.calls.call import name_leaves
from distribax.execution.programs.results import Held, Part, hold
from distribax.execution.replicas.outcome import SPLIT, Outcome
from distribax.execution.replicas.uneven import run_uneven
from distribax.execution.traces import captured, frames, trace_errors
from distribax.execution.traces.variant import Variant
from distribax.topology import REPLICA_AXIS
from distribax.types import ReduceOp
from distribax.values import (
    Form,
    Global,
    IndexedSlices,
    Local,
    Mirrored,
    Origins,
    Padded,
    PerReplica,
    is_none_wrapped_or_opaque,
    is_slices,
    is_wrapped,
    is_wrapped_opaque_or_slices,
    is_wrapped_or_opaque,
    nests,
    reduce_without_idle,
)
from distribax.values.layout import cut_to, gather_joined


class SpmdRunner(contracts.Runner):
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
    @override
    def replica_id(self) -> jax.Array:
        self.uses_replica_id = True
        return lax.axis_index(REPLICA_AXIS)

    @property
    @override
    def is_idle(self) -> bool:
        return self.frame.variant is not None and self.frame.variant.is_idle

    @override
    def merge(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        args, kwargs = nests.map_leaves(self.wrap, (args, kwargs), is_wrapped_opaque_or_slices)
        with context.enter(context.Entry(self.strategy)):
            result = fn(self.strategy, *args, **kwargs)
        return nests.map_leaves(self._give_back, result, is_wrapped_or_opaque)

    @override
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

    @override
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
            own = self.unify_slices(leaf)
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

    def unify_slices(self, slices: IndexedSlices) -> IndexedSlices:
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
        # From a merge function, which is in the program of the replicas already.
        runner = SpmdRunner(strategy, outer, ops, Origins())
        own = nests.map_leaves(runner.unwrap, (tuple(args), dict(kwargs)), is_wrapped_or_opaque)
        with context.enter(context.Entry(strategy, context.ReplicaContext(strategy, runner))):
            result = fn(*own[0], **own[1])
        return nests.map_leaves(runner.wrap, result, is_wrapped_opaque_or_slices)
    outer.function.mesh = mesh
    if jax_private.has_mesh():
        raise NeedsOwnMesh
    return _ReplicaProgram(strategy, outer, mesh, ops, fn, args, kwargs).run()


class _ReplicaProgram:
    """The one program of all replicas of a `strategy.run`, as a part of the traced function."""

    def __init__(
        self,
        strategy: contracts.Strategy,
        outer: frames.Frame,
        mesh: Mesh,
        ops: CrossDeviceOps,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        self._strategy = strategy
        self._outer = outer
        self._mesh = mesh
        self._ops = ops
        self._fn = fn
        self._names = name_leaves(fn, args, kwargs, is_wrapped_or_opaque)
        self._leaves, self._tree = nests.flatten((tuple(args), dict(kwargs)), is_wrapped_or_opaque)
        self._given = [_make_input(leaf, mesh) for leaf in self._leaves]
        self._inputs = [each for each in self._given if each is not None]
        # All of them, as the replicas' values cannot be reached from inside.
        self._stacked = frames.find_per_replica(NamedSharding(mesh, SPLIT))
        self._found = captured.find_known(outer.function, mesh)
        # The arrays that enter, in three lists, and how each is divided among the replicas.
        self._arrays = (
            [each.array for each in self._inputs],
            [outer.function.lift(variable) for variable in self._stacked],
            [outer.function.lift(state) for state in self._found],
        )
        self._specs = (
            [each.spec for each in self._inputs],
            [SPLIT] * len(self._stacked),
            [state.layout.spec for state in self._found],
        )
        self._entering = [
            pair
            for arrays, specs in zip(self._arrays, self._specs, strict=True)
            for pair in zip(arrays, specs, strict=True)
        ]
        # Both are known once the replicas' code is traced.
        self._out_specs: list[PartitionSpec] = []
        self._outcome: Outcome | None = None

    def run(self) -> Any:
        """Adds the program to the traced function, and returns what the replicas return."""
        # A function of its own, which JAX's errors describe by the replicas' code and arguments.
        body = functools.partial(self._trace)
        jax_private.set_description(body, self._describe())
        program = jax_private.shard_map(body, self._mesh, self._specs, self._out_specs)
        outputs = iter(program(*self._arrays))
        outcome = self._outcome
        assert outcome is not None
        merged = [
            part.value if isinstance(part, Held) else _merge(part, next(outputs))
            for part in outcome.plan
        ]
        for variable in outcome.written:
            self._outer.write(variable, next(outputs))
        return jax.tree.unflatten(outcome.tree, merged)

    def _describe(self) -> jax_private.Description:
        # Not as many: JAX does not know all of the containers.
        paired = zip(self._names, self._given, strict=False)
        names = [name for name, each in paired if each is not None]
        names += [state.described for state in (*self._stacked, *self._found)]
        return jax_private.describe("strategy.run", self._fn, names)

    def _trace(
        self,
        local_inputs: list[jax.Array],
        local_stacked: list[jax.Array],
        local_found: list[jax.Array],
    ) -> list[jax.Array]:
        """Traces what all replicas do, given a replica's parts of the arrays."""
        padded = [layout for layout in self._inputs if isinstance(layout, Padded)]
        local_states = [*local_stacked, *local_found]
        if padded:
            outcome = run_uneven(self._call, local_inputs, local_states, padded, self._mesh)
        else:
            outcome = self._call(local_inputs, local_states, None)
        self._outcome = outcome
        # Filled, not replaced: JAX reads the list after it has traced this function.
        self._out_specs[:] = outcome.specs
        return outcome.outputs

    def _call(
        self,
        local_inputs: Sequence[jax.Array],
        local_states: Sequence[jax.Array],
        variant: Variant | None,
    ) -> Outcome:
        """Calls the function once, for all replicas or for those of one size."""
        frame = self._open_frame(local_states, variant)
        runner = SpmdRunner(self._strategy, frame, self._ops, Origins())
        args, kwargs = self._enter_arguments(local_inputs, runner.origins, variant)
        replica = context.ReplicaContext(self._strategy, runner)
        with (
            trace_errors.explain(lambda: runner.uses_replica_id),
            frames.enter(frame),
            context.enter(context.Entry(self._strategy, replica)),
        ):
            result = self._fn(*args, **kwargs)
        flat, tree = _flatten_results(result, runner)
        own = [leaf if _is_found(leaf) else runner.unwrap(leaf) for leaf in flat]
        plan, outputs = _sort(own, runner)
        # What another variant writes is written here too, with the value that it has.
        required = {} if variant is None else variant.known.written
        written = list(dict.fromkeys((*required, *frame.written)))
        for variable in written:
            value = frame.read(variable)
            outputs.append(value[None] if variable.per_replica else value)
        return Outcome(tree, plan, written, outputs)

    def _open_frame(
        self, local_states: Sequence[jax.Array], variant: Variant | None
    ) -> frames.RunFrame:
        """Returns the frame in which replicas find their own values of variables."""
        values = iter(local_states)
        local: dict[contracts.State, Any] = {
            variable: next(values)[0] for variable in self._stacked
        }
        for state in self._found:
            local[state] = state.take_local(next(values))
        return frames.RunFrame(self._outer, self._mesh, local, self._entering, variant)

    def _enter_arguments(
        self, local_inputs: Sequence[jax.Array], origins: Origins, variant: Variant | None
    ) -> Any:
        """Returns a replica's arguments, given its parts of the arrays."""
        remaining = iter(local_inputs)
        return jax.tree.unflatten(
            self._tree,
            [
                leaf if each is None else _enter(next(remaining), leaf, each, origins, variant)
                for leaf, each in zip(self._leaves, self._given, strict=True)
            ],
        )


def _flatten_results(result: object, runner: SpmdRunner) -> tuple[list[Any], PyTreeDef]:
    flat, tree = nests.flatten(
        result, lambda leaf: leaf is None or is_wrapped_opaque_or_slices(leaf)
    )
    if any(map(is_slices, flat)):
        own = [runner.unify_slices(leaf) if is_slices(leaf) else leaf for leaf in flat]
        result = jax.tree.unflatten(tree, own)
        return nests.flatten(result, is_none_wrapped_or_opaque)
    return flat, tree


def _is_found(leaf: object) -> bool:
    """Tells whether a result is a value of all replicas that the code has found as it is."""
    if not isinstance(leaf, Mirrored) or isinstance(leaf.layout, Local):
        return False
    return not jax_private.is_tracer(leaf.get())


def _merge(form: Form | None, array: jax.Array) -> Any:
    """Wraps a result, unless it is one value: of all replicas, or of the only one."""
    if form is None:
        return array
    wrapped = form.wrap(array)
    return wrapped.part(0) if form.mesh.size == 1 else wrapped


def _make_input(leaf: object, mesh: Mesh) -> Global | Padded | None:
    """Returns an argument as the program takes it; None if it is no array."""
    if is_wrapped(leaf):
        # What one process has made by hand cannot be a part of the program of all.
        is_known = leaf.layout.mesh == mesh or not mesh.is_multi_process
        layout: Global | Padded | None = None
        if is_known:
            lifted = captured.lift(leaf, mesh)
            layout = lifted.on_mesh(mesh)
            if layout is None and isinstance(leaf, Mirrored):
                return Global(leaf.get(), mesh, mirrored=True)
            layout = layout or lifted.pad(mesh)
        if layout is None:
            raise HostOnly("the pieces of an argument cannot be one array", HostMode.EAGER)
        return layout
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return Global(leaf, mesh, mirrored=True)
    return None


def _enter(
    value: jax.Array,
    leaf: object,
    layout: Global | Padded,
    origins: Origins,
    variant: Variant | None,
) -> jax.Array:
    """Gives a replica its part of an argument."""
    if isinstance(layout, Padded):
        assert variant is not None
        return cut_to(value, layout.shapes[variant.replica_id])
    if layout.mirrored:
        return origins.note(value, leaf, 0)
    return value[0] if layout.stacked else value


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
            plan.append(None if bare else Form(runner.mesh, mirrored=True))
            outputs.append(value)
        else:
            scalar = value.ndim == 0
            idle = runner.frame.idle.find()
            plan.append(Form(runner.mesh, stacked=scalar, idle=idle))
            outputs.append(value[None] if scalar else value)
    return plan, outputs

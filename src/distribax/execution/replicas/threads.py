"""Eager replicas: one thread for each, taking turns, that meet at barriers.

Only one replica's Python code runs at a time: each runs until it reaches a meeting point
(`merge_call`, `all_reduce`, a synchronised write) or its end, then the next one runs. JAX
dispatches asynchronously, so the devices are busy at the same time all the same, and the order is
the same in every run.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.errors import ReplicaAborted
from distribax.types import CommunicationOptions, ReduceOp
from distribax.values import (
    DistributedValues,
    IdleReplicas,
    Mirrored,
    Origins,
    PerReplica,
    find_idle,
    is_wrapped,
    is_wrapped_or_opaque,
    nests,
    regroup,
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class _MergeRequest:
    """The call for which a replica waits at a meeting point."""

    fn: Callable[..., object]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    # What a replica can do alone, if the others do not come: it need not wait for them.
    alone: Callable[..., object] | None = None
    # What all replicas must ask for alike, in words: "all_reduce(SUM)".
    settings: str = ""

    @property
    def target(self) -> object:
        """What is the same for all replicas that make the same call."""
        fn = self.fn
        while isinstance(fn, partial):
            fn = fn.func
        return getattr(fn, "__code__", fn), self.settings

    @property
    def name(self) -> str:
        """The call as error messages name it."""
        return self.settings or getattr(self.fn, "__qualname__", repr(self.fn))


class _Replica(threading.Thread):
    """One replica's thread; it runs only between `resume` and its next meeting point."""

    def __init__(
        self,
        run: _Run,
        replica_id: int,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        super().__init__(name=f"distribax-replica-{replica_id}", daemon=True)
        self.run_state = run
        self.replica_id = replica_id
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.merge_request: _MergeRequest | None = None
        self.merge_result: Any = None
        self.merge_error: Exception | None = None
        # Whether it goes on without the others.
        self.is_alone = False
        self.num_merges = 0
        self._turn = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._aborted = False
        # The caller's context (scopes, frames) is the replica's, minus what the engine adds.
        self._context = contextvars.copy_context()

    def resume(self) -> None:
        """Lets the replica run until its next meeting point or its end."""
        # Another replica has run, with other values of the variables.
        jax_private.forget_closures()
        self._turn.release()
        self._paused.acquire()

    def abort(self) -> None:
        """Unwinds a paused replica."""
        if not self.done:
            self._aborted = True
            self.resume()

    def meet(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        alone: Callable[..., object] | None = None,
        settings: str = "",
    ) -> Any:
        """Called by the replica: waits for the others, and returns this replica's part."""
        self.merge_request = _MergeRequest(fn, args, kwargs, alone, settings)
        self.num_merges += 1
        self._paused.release()
        self._turn.acquire()
        self.merge_request = None
        if self._aborted:
            raise ReplicaAborted
        if self.is_alone:
            assert alone is not None
            self.num_merges -= 1
            self.is_alone = False
            return alone(*args, **kwargs)
        if self.merge_error is not None:
            raise self.merge_error
        return self.merge_result

    @override
    def run(self) -> None:
        self._turn.acquire()
        try:
            self.run_state.apply_settings()
            if not self._aborted:
                self.result = self._context.run(self._call)
        except ReplicaAborted:
            pass
        except BaseException as error:  # Handed to the caller, which raises it.
            self.error = error
        finally:
            self.done = True
            self._paused.release()

    def _call(self) -> Any:
        state = self.run_state
        replica = context.ReplicaContext(state.strategy, _ThreadRunner(self))
        entry = context.Entry(state.strategy, replica)
        with context.enter(entry), jax.default_device(state.devices[self.replica_id]):
            return state.fn(*self.args, **self.kwargs)


class _ThreadRunner(contracts.Runner):
    """The meeting points of a replica that has its own thread."""

    # A function compiled inside the thread could not meet the other replicas.
    compiles = False

    def __init__(self, replica: _Replica) -> None:
        self.replica = replica

    @property
    @override
    def replica_id(self) -> int:
        return self.replica.run_state.first_replica + self.replica.replica_id

    @property
    @override
    def copy_id(self) -> int:
        return self.replica.replica_id

    @property
    @override
    def is_idle(self) -> bool:
        return self.replica.run_state.idle.has(self.replica_id)

    @override
    def create_variable(self, create: Callable[[], _T], place: str) -> _T:
        return self.replica.run_state.create_variable(self.replica.replica_id, create, place)

    @override
    def merge(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        _refuse_tracers("merge_call", jax.tree.leaves((args, kwargs)))
        return self.replica.meet(fn, args, kwargs)

    @override
    def call_together(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        alone: Callable[..., object],
    ) -> Any:
        return self.replica.meet(fn, args, kwargs, alone)

    @override
    def all_reduce(
        self, op: ReduceOp, leaves: list[jax.Array], options: CommunicationOptions | None
    ) -> list[jax.Array]:
        def combine(strategy: contracts.Strategy, *values: object) -> list[Any]:
            return strategy.extended.reduce_all(op, list(values), options)

        what = f"all_reduce({op.name})"
        return _call_differentiable(lambda xs: self._exchange(what, combine, xs), leaves)

    @override
    def all_gather(
        self, leaves: list[jax.Array], axis: int, options: CommunicationOptions | None
    ) -> list[jax.Array]:
        starts: Sequence[int] = ()

        def combine(
            strategy: contracts.Strategy, *values: DistributedValues | jax.Array
        ) -> list[Any]:
            devices = strategy.extended.local_devices
            joined = [
                strategy.extended.gather_to(value, devices, axis, options) for value in values
            ]
            first = strategy.extended.first_replica
            return [*joined, *(_find_starts(value, axis, first) for value in values)]

        def gather(xs: list[jax.Array]) -> list[jax.Array]:
            nonlocal starts
            met = self._exchange(f"all_gather(axis={axis})", combine, xs)
            starts = met[len(xs) :]
            return met[: len(xs)]

        def total(strategy: contracts.Strategy, *values: object) -> list[Any]:
            return strategy.extended.reduce_all(ReduceOp.SUM, list(values), options)

        def take_own_part(cotangents: list[jax.Array]) -> list[jax.Array]:
            # What a replica gave went to all replicas, so their gradients to it are added up.
            sums = self._exchange(f"all_gather(axis={axis})", total, cotangents)
            return [
                jax.lax.slice_in_dim(value, start, start + size, axis=axis % value.ndim)
                for value, start, size in zip(sums, starts, sizes, strict=True)
            ]

        sizes = [jnp.shape(leaf)[axis] for leaf in leaves]
        return _call_differentiable(gather, leaves, take_own_part)

    def _exchange(
        self, what: str, combine: Callable[..., object], leaves: list[jax.Array]
    ) -> list[Any]:
        _refuse_tracers(what.partition("(")[0], leaves)
        # New objects, as equal constants of all replicas are still one value for each replica.
        own = [jax_private.rewrap(jnp.asarray(leaf)) for leaf in leaves]
        return self.replica.meet(combine, own, {}, settings=what)


def _refuse_tracers(what: str, leaves: Iterable[object]) -> None:
    if any(jax_private.is_tracer(leaf) for leaf in leaves):
        raise RuntimeError(
            f"{what}: called inside jax.jit (or another JAX transformation that stages code) in a "
            "replica that runs eagerly, where the other replicas cannot be met. Decorate the step "
            "with @dx.function instead of @jax.jit, and call strategy.run inside it."
        )


def _find_starts(value: DistributedValues | jax.Array, axis: int, first: int) -> PerReplica:
    """Returns where the pieces of this process's replicas begin in the gathered value."""
    shapes = value.shapes() if is_wrapped(value) else [value.shape]
    sizes = [shape[axis] for shape in shapes]
    count = len(value.values) if is_wrapped(value) else 1
    return PerReplica([sum(sizes[:index]) for index in range(first, first + count)])


def _call_differentiable(
    exchange: Callable[[list[jax.Array]], list[jax.Array]],
    leaves: Sequence[jax.Array],
    backward: Callable[[list[jax.Array]], list[jax.Array]] | None = None,
) -> list[jax.Array]:
    """Lets gradients flow through a meeting of the replicas: they meet again on the way back."""
    call = jax.custom_vjp(exchange)
    call.defvjp(
        lambda xs: (exchange(xs), None), lambda _, cotangents: ((backward or exchange)(cotangents),)
    )
    return call(list(leaves))


class _Run:
    """One eager `run`: the replicas' threads and what they share."""

    def __init__(
        self,
        strategy: contracts.Strategy,
        fn: Callable[..., object],
        idle: IdleReplicas,
    ) -> None:
        self.strategy = strategy
        self.devices = strategy.extended.local_devices
        self.first_replica = strategy.extended.first_replica
        self.fn = fn
        self.idle = idle
        # What `with jax.enable_x64(True):` and its like set, around the run.
        self.apply_settings = jax_private.copy_thread_settings()
        self.origins = Origins()
        # By line of code: replica 0 alone creates what is made once and kept (`if v is None:`).
        self.variables: dict[str, list[Any]] = {}
        self.num_created: dict[tuple[int, str], int] = {}

    def create_variable(self, replica_id: int, create: Callable[[], _T], place: str) -> _T:
        """Creates the next variable of a line of code, or returns the one of replica 0."""
        made = self.variables.setdefault(place, [])
        index = self.num_created.get((replica_id, place), 0)
        self.num_created[replica_id, place] = index + 1
        if index == len(made):
            if replica_id != 0:
                raise RuntimeError(
                    f"dx.Variable: replica {replica_id} creates variable number {index + 1} at "
                    f"{place}, where replica 0 has created {index}. Every replica must create the "
                    "same variables; do not put it under a condition that differs between "
                    "replicas."
                )
            made.append(create())
        return made[index]

    def give(self, leaf: object, replica_id: int) -> Any:
        """Returns a replica's part of an argument, on its device."""
        if is_wrapped(leaf):
            leaf.require_replicas(len(self.devices))
            piece = self._move(leaf.part(replica_id), replica_id)
            if isinstance(leaf, Mirrored):
                self.origins.note(piece, leaf, replica_id)
            return piece
        if isinstance(leaf, jax.Array) and not jax_private.is_tracer(leaf):
            return self.origins.note(self._move(leaf, replica_id), leaf, replica_id)
        return leaf

    def _move(self, value: object, replica_id: int) -> Any:
        def move(leaf: object) -> object:
            if not isinstance(leaf, jax.Array) or jax_private.is_tracer(leaf):
                return leaf
            return jax_private.rewrap(jax_private.move_to_device(leaf, self.devices[replica_id]))

        return jax.tree.map(move, value)

    def split(self, nest: object) -> list[Any]:
        """Returns a nest with each replica's part of it, for all replicas."""
        return [
            nests.map_leaves(partial(self.give, replica_id=index), nest, is_wrapped_or_opaque)
            for index in range(len(self.devices))
        ]


@jax_private.leave_mesh()
def run_in_threads(
    strategy: contracts.Strategy,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Any:
    """Runs `fn` once for each replica and merges what they return."""
    if jax_private.is_tracing():
        raise RuntimeError(
            "strategy.run: called inside a JAX transformation (jax.jit, jax.grad, "
            "dx.value_and_grad, jax.lax.scan, ...), whose values the threads of eager replicas "
            "cannot use. Decorate the whole step with @dx.function instead of @jax.jit, or call "
            "the transformation inside the function given to strategy.run()."
        )
    state = _Run(strategy, fn, _find_idle(strategy, (args, kwargs)))
    replicas = [
        _Replica(state, index, *part)
        for index, part in enumerate(state.split((tuple(args), dict(kwargs))))
    ]
    for replica in replicas:
        replica.start()
    try:
        while _advance(replicas):
            _merge(state, replicas)
    finally:
        for replica in replicas:
            replica.abort()
            replica.join()
    results = [replica.result for replica in replicas]
    return regroup(results, state.origins, mesh=strategy.extended.mesh, idle=state.idle)


def _find_idle(strategy: contracts.Strategy, nest: object) -> IdleReplicas:
    leaves = jax.tree.leaves(nest, is_leaf=is_wrapped_or_opaque)
    layouts = [leaf.layout for leaf in leaves if isinstance(leaf, PerReplica)]
    return find_idle(layouts, strategy.num_replicas_in_sync)


def _advance(replicas: list[_Replica]) -> bool:
    """Runs each replica to its next meeting point; False when all have ended."""
    _resume(replicas)
    while lonely := _find_lonely(replicas):
        for replica in lonely:
            replica.is_alone = True
        _resume(lonely)
    waiting = [replica.replica_id for replica in replicas if not replica.done]
    if waiting and len(waiting) < len(replicas):
        ended = [replica.replica_id for replica in replicas if replica.done]
        counts = {replica.replica_id: replica.num_merges for replica in replicas}
        raise RuntimeError(
            f"strategy.run: replicas {waiting} wait in merge_call or all_reduce for replicas "
            f"{ended}, which have ended (meetings so far, by replica: {counts}). Every replica "
            "must make the same calls in the same order; do not put them under a condition that "
            "differs between replicas."
        )
    return bool(waiting)


def _resume(replicas: list[_Replica]) -> None:
    for replica in replicas:
        replica.resume()
        if replica.error is not None:
            raise replica.error


def _find_lonely(replicas: list[_Replica]) -> list[_Replica]:
    """Returns the replicas that need not wait, unless all of them have come to the same call."""
    requests = [replica.merge_request for replica in replicas if replica.merge_request]
    if len(requests) == len(replicas) and len({request.fn for request in requests}) == 1:
        return []
    return [
        replica
        for replica in replicas
        if replica.merge_request is not None and replica.merge_request.alone is not None
    ]


def _merge(state: _Run, replicas: list[_Replica]) -> None:
    requests = [replica.merge_request for replica in replicas if replica.merge_request]
    if len({request.target for request in requests}) > 1:
        names = [request.name for request in requests]
        raise RuntimeError(
            f"strategy.run: the replicas meet in different calls, {names} by replica. Every "
            "replica must call merge_call, all_reduce and the like in the same order."
        )
    merged_args, merged_kwargs = regroup(
        [(each.args, each.kwargs) for each in requests],
        state.origins,
        mesh=state.strategy.extended.mesh,
        idle=state.idle,
    )
    try:
        with context.enter(context.Entry(state.strategy)):
            result = requests[0].fn(state.strategy, *merged_args, **merged_kwargs)
    except Exception as error:
        if requests[0].alone is None:
            raise
        # Each of them has called the function, so each of them may handle the error.
        for replica in replicas:
            replica.merge_error = error
        return
    for replica, part in zip(replicas, state.split(result), strict=True):
        replica.merge_result = part

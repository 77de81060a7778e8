"""What one replica sees and writes of foreign variables while it runs.

A replica's writes are its own until they are settled: at the end of the replica, or when a step
that all replicas take together (an optimizer's) begins. A replica that fails has written nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import context, contracts, jax_private
from distribax.execution import frames
from distribax.integrations.foreign_variable import Arrays, ForeignVariable, Handle
from distribax.types import ReduceOp, VariableAggregation
from distribax.values import NONE_IDLE, Local, PerReplica, Pieces

_MEAN, _SUM = VariableAggregation.MEAN, VariableAggregation.SUM

_state: ContextVar[ReplicaState | None] = ContextVar("distribax_replica_state", default=None)


def current() -> ReplicaState | None:
    """Returns the state of the replica that runs now; None where writes count at once."""
    state = _state.get()
    if state is None or context.current() is not state.entry:
        return None
    # Code that is run outside of the trace of a replica (`frames.run_outside`) is not in it.
    return None if state.frame is not None and frames.current() is None else state


def read(variable: ForeignVariable) -> Any:
    """Returns the value of a foreign variable as the code that runs now sees it."""
    state = current()
    if state is not None:
        return state.read(variable)
    frame = frames.current()
    return variable.read() if frame is None else frame.read(_find_handle(variable, frame))


def write(variable: ForeignVariable, value: Arrays) -> None:
    """Replaces the value of a foreign variable, by the rules of where the code runs."""
    state = current()
    frame = frames.current()
    if state is not None:
        state.write(variable, value)
    elif frame is None:
        variable.write(value)
    elif not _have_same_leaves(value, frame.read(_find_handle(variable, frame))):
        frame.write(_find_handle(variable, frame), _to_arrays(variable, value))


def commit() -> None:
    """Hands over what the replica that runs now has written so far."""
    state = current()
    if state is not None:
        state.commit()
        state.pending.clear()


def _find_handle(variable: ForeignVariable, frame: frames.Frame) -> Handle:
    here = context.current()
    in_replica = here.replica_context is not None and context.has_strategy()
    return variable.find_handle_in(frame, here.strategy if in_replica else None)


def with_state(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` for replicas that keep their writes apart until they end.

    The default strategy has no such replicas, and the only replica of a compiled step writes to the
    step's own frame, which is kept apart already.
    """

    def call(*args: object, **kwargs: object) -> Any:
        in_program = frames.current() is not None
        if not context.has_strategy() or (in_program and context.get_strategy().extended.single):
            return fn(*args, **kwargs)
        state = ReplicaState()
        token = _state.set(state)
        try:
            result = fn(*args, **kwargs)
            state.commit()
            return result
        finally:
            _state.reset(token)

    # For messages that name the function and its arguments.
    call.__wrapped__ = fn  # type: ignore[attr-defined]
    return call


class ReplicaState:
    """The variables' values in one replica of several."""

    def __init__(self) -> None:
        self.entry = context.current()
        assert self.entry.replica_context is not None
        self.replica = self.entry.replica_context
        self.strategy = self.entry.strategy
        frame = frames.current()
        self.frame = frame if isinstance(frame, frames.RunFrame) else None
        self.pending: dict[ForeignVariable, Any] = {}
        # The pending values that are known to be the same in every replica.
        self._same: set[ForeignVariable] = set()
        # Whether the code that runs now is given the same in every replica.
        self.is_together = False
        # What has been read, beside what it was made of: reading again gives the same object.
        self._pieces: dict[ForeignVariable, tuple[Any, Any]] = {}
        self._views: dict[ForeignVariable, tuple[Any, Any]] = {}

    # Reading and writing.

    def read(self, variable: ForeignVariable) -> Any:
        """Returns the replica's own value."""
        return (
            self.pending[variable] if variable in self.pending else self._read_unwritten(variable)
        )

    def _read_unwritten(self, variable: ForeignVariable) -> Any:
        stored = self._read_stored(variable)
        if self.is_together:
            return stored
        known = self._views.get(variable)
        if known is not None and known[0] is stored:
            return known[1]
        own = self._make_own(variable, stored)
        if self._is_at_top_level():
            self._views[variable] = (stored, own)
        return own

    def write(self, variable: ForeignVariable, value: Arrays) -> None:
        """Replaces the replica's own value."""
        self._same.discard(variable)
        if _have_same_leaves(value, self._read_unwritten(variable)):
            # Libraries write back what a function has not changed, or what they had set aside.
            self.pending.pop(variable, None)
            return
        self.pending[variable] = _to_arrays(variable, value)
        if self.is_together:
            self._same.add(variable)

    def _read_stored(self, variable: ForeignVariable) -> Any:
        if self.frame is not None:
            return self.frame.read(variable.find_handle_in(self.frame, self.strategy))
        variable.owner = self.strategy
        placement = variable.find_handle(self.strategy).placement
        source = variable.place(placement)
        known = self._pieces.get(variable)
        if known is None or known[0] is not source:
            known = self._pieces[variable] = (
                source,
                variable.get_piece(self.replica.runner.copy_id),
            )
        return known[1]

    def _make_own(self, variable: ForeignVariable, stored: Arrays) -> Any:
        if variable.rule.view is None or self.replica.num_replicas_in_sync == 1:
            return stored
        return variable.rule.view(stored, self.replica.replica_id_in_sync_group)

    def _is_at_top_level(self) -> bool:
        if self.frame is None:
            return not jax_private.is_tracing()
        return jax_private.get_innermost_trace() is self.frame.trace

    # Bringing the replicas together.

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Runs code that is given the same in every replica and so writes the same in each."""
        self.settle()
        self.is_together = True
        try:
            yield
        finally:
            self.is_together = False

    def add_up(self, nest: object) -> Any:
        """Returns `nest` with its arrays, and its functions' results, added up over replicas."""
        nest = jax.tree.map(lambda x: self._sum_results(x) if callable(x) else x, nest)
        return self._exchange(nest, lambda arrays: self.replica.all_reduce(ReduceOp.SUM, arrays))

    def _sum_results(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the sum of a function over the replicas, whose gradients are sums as well."""

        def call(*args: object, **kwargs: object) -> Any:
            def forward(*args: object) -> tuple[Any, Any]:
                result, backward = jax.vjp(lambda *args: fn(*args, **kwargs), *args)
                return self.add_up(result), backward

            total = jax.custom_vjp(lambda *args: self.add_up(fn(*args, **kwargs)))
            total.defvjp(forward, lambda backward, cotangents: self.add_up(backward(cotangents)))
            return total(*args)

        return call

    def gather(self, nest: object) -> Any:
        """Returns `nest` with the elements of its arrays, in one dimension, from all replicas."""
        flat = lambda arrays: [jnp.ravel(array) for array in arrays]  # noqa: E731
        return self._exchange(nest, lambda arrays: self.replica.all_gather(flat(arrays), axis=0))

    def _exchange(
        self, nest: object, exchange: Callable[[list[jax.Array]], list[jax.Array]]
    ) -> Any:
        leaves, tree = jax.tree.flatten(nest)
        arrays = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        exchanged = exchange([leaves[index] for index in arrays]) if arrays else []
        for index, value in zip(arrays, exchanged, strict=True):
            leaves[index] = self._find_shared(value)
        return jax.tree.unflatten(tree, leaves)

    def _find_shared(self, value: jax.Array) -> jax.Array:
        return value if self.frame is None else self.frame.find_shared(value)[0]

    def settle(self) -> None:
        """Makes the pending values one for all replicas, by the variables' rules."""
        unsettled = self.list_unsettled()
        if not unsettled:
            return
        if self.is_idle:
            self._take_back(unsettled)
        variables, values = self.replica.merge_call(_combine, args=(self,))
        for variable, leaves in zip(variables, values, strict=True):
            old, tree = jax.tree.flatten(self.pending[variable])
            new = [
                _restore_key(self._find_shared(leaf), was)
                for leaf, was in zip(leaves, old, strict=True)
            ]
            self.pending[variable] = jax.tree.unflatten(tree, new)
            self._same.add(variable)

    @property
    def is_idle(self) -> bool:
        """Whether the replica's piece of the batch is empty, so that it has seen no example."""
        return self.replica.runner.is_idle

    def _take_back(self, variables: list[ForeignVariable]) -> None:
        """Makes the replica's parts of sums what they were before it ran."""
        for variable in variables:
            if variable.rule.aggregation is _SUM:
                self.pending[variable] = _to_arrays(variable, self._read_unwritten(variable))

    def list_unsettled(self) -> list[ForeignVariable]:
        """Returns the variables whose pending values may differ between replicas."""
        if self.replica.num_replicas_in_sync == 1:
            return []
        return [
            variable
            for variable in self.pending
            if variable not in self._same
            and variable.rule.aggregation is not VariableAggregation.NONE
        ]

    def commit(self) -> None:
        """Hands the pending values over to the variables."""
        self.settle()
        if not self.pending:
            return
        if self.frame is None:
            self.replica.merge_call(_store, args=(self,))
            return
        for variable, value in self.pending.items():
            self.frame.write(variable.find_handle_in(self.frame, self.strategy), value)


# What the replicas do together, outside of them.


def _combine(
    strategy: contracts.Strategy, states: PerReplica | ReplicaState
) -> tuple[tuple[ForeignVariable, ...], list[list[Any]]]:
    replicas = _list_replicas(states)
    if isinstance(states, PerReplica):
        # All processes come here, so they can tell each other.
        states.idle.find()
    variables = tuple(replicas[0].list_unsettled())
    values: list[list[Any]] = [[] for _ in variables]
    reduced: dict[ReduceOp, list[tuple[int, int, Any]]] = {ReduceOp.SUM: [], ReduceOp.MEAN: []}
    for index, variable in enumerate(variables):
        for leaves in _list_leaves(variable, replicas):
            op = _choose_operation(variable, leaves[0])
            if op is None:
                values[index].append(_take_first(strategy, leaves, replicas[0].frame))
                continue
            if op is ReduceOp.MEAN:
                leaves = _leave_out_idle(leaves, replicas)
            wrapped = _wrap(leaves, replicas[0].frame, states)
            reduced[op].append((index, len(values[index]), wrapped))
            values[index].append(None)
    for op, entries in reduced.items():
        pairs = [(value, None) for _, _, value in entries]
        results = strategy.extended.batch_reduce_to(op, pairs) if pairs else []
        for (index, position, _), result in zip(entries, results, strict=True):
            values[index][position] = result
    return variables, values


def _store(strategy: contracts.Strategy, states: PerReplica | ReplicaState) -> None:
    replicas = _list_replicas(states)
    for variable in replicas[0].pending:
        variable.keep_pieces(
            [replica.pending[variable] for replica in replicas],
            variable.find_handle(strategy).placement,
        )


def _list_replicas(states: PerReplica | ReplicaState) -> list[ReplicaState]:
    replicas = list(states.values) if isinstance(states, PerReplica) else [states]
    first = replicas[0].pending.keys()
    for replica_id, replica in enumerate(replicas):
        if replica.pending.keys() != first:
            odd = sorted(variable.name for variable in replica.pending.keys() ^ first)
            raise RuntimeError(
                f"strategy.run: replica {replica_id} has written other variables than replica 0: "
                f"{', '.join(odd)}. Every replica must write the same variables; do not put a "
                "write under a condition that differs between replicas."
            )
    return replicas


def _list_leaves(
    variable: ForeignVariable, replicas: list[ReplicaState]
) -> Iterator[tuple[Any, ...]]:
    """Yields the replicas' values of each array of a variable."""
    flat: list[tuple[list[Any], Any]] = [
        jax.tree.flatten(replica.pending[variable]) for replica in replicas
    ]
    shapes = [[jnp.shape(leaf) for leaf in leaves] for leaves, _ in flat]
    if any(tree != flat[0][1] for _, tree in flat) or any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"strategy.run: the replicas have written values of different form to {variable.name}: "
            f"shapes {shapes}, by replica. State that replicas share cannot depend on the size of "
            "a replica's batch; return such a value from the replica instead."
        )
    return zip(*(leaves for leaves, _ in flat), strict=True)


def _choose_operation(variable: ForeignVariable, leaf: jax.Array) -> ReduceOp | None:
    """Returns how an array is combined; None means that the first replica's is taken."""
    if variable.rule.aggregation is _SUM and jnp.issubdtype(leaf.dtype, jnp.number):
        return ReduceOp.SUM
    has_mean = variable.rule.aggregation is _MEAN and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return ReduceOp.MEAN if has_mean else None


def _leave_out_idle(
    leaves: tuple[jax.Array, ...], replicas: list[ReplicaState]
) -> tuple[jax.Array, ...]:
    """Returns values whose mean is that of the replicas that have seen examples."""
    # NaNs of idle replicas do not count when values are reduced.
    return tuple(
        jnp.full_like(leaf, jnp.nan) if replica.is_idle else leaf
        for leaf, replica in zip(leaves, replicas, strict=True)
    )


def _wrap(
    leaves: tuple[jax.Array, ...],
    frame: frames.RunFrame | None,
    states: PerReplica | ReplicaState | None = None,
) -> PerReplica:
    if frame is not None:
        return PerReplica.of(Local(leaves[0], frame.mesh), frame.idle)
    idle = states.idle if isinstance(states, PerReplica) else NONE_IDLE
    return PerReplica.of(Pieces(leaves), idle)


def _take_first(
    strategy: contracts.Strategy, leaves: tuple[jax.Array, ...], frame: frames.RunFrame | None
) -> Any:
    if jax_private.is_key(leaves[0]):
        leaves = tuple(jax.random.key_data(leaf) for leaf in leaves)
    return strategy.extended.first_value(_wrap(leaves, frame))


def _restore_key(value: jax.Array, old: jax.Array) -> jax.Array:
    """Returns a combined value in the type of the old one: a random key, or a number."""
    if jax_private.is_key(old):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(old))
    return value


def _have_same_leaves(value: Arrays, known: Arrays) -> bool:
    new, old = jax.tree.leaves(value), jax.tree.leaves(known)
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _to_arrays(variable: ForeignVariable, value: Arrays) -> Any:
    return jax.tree.map(lambda leaf: _to_array(variable, leaf), value)


def _to_array(variable: ForeignVariable, leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        return jnp.asarray(leaf)
    raise TypeError(
        f"{variable.name} was given {leaf!r} in a replica, which is not an array. State "
        "that replicas write consists of arrays and numbers; set anything else outside of "
        "strategy.run()."
    )

"""What one replica sees and writes of cells while it runs.

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
from distribax.integrations.foreign_variable import Arrays, Cell, Handle
from distribax.types import ReduceOp, VariableAggregation
from distribax.values import NONE_IDLE, Local, PerReplica, Pieces

_MEAN, _SUM = VariableAggregation.MEAN, VariableAggregation.SUM

_state: ContextVar[ReplicaState | None] = ContextVar("distribax_replica_state", default=None)


def current() -> ReplicaState | None:
    """Returns the state of the replica that runs now; None where writes go straight to cells."""
    state = _state.get()
    if state is None or context.current() is not state.entry:
        return None
    # Code that is run outside of the trace of a replica (`frames.run_outside`) is not in it.
    return None if state.frame is not None and frames.current() is None else state


def read(cell: Cell) -> Any:
    """Returns the value of a cell as the code that runs now sees it."""
    state = current()
    if state is not None:
        return state.read(cell)
    frame = frames.current()
    return cell.read() if frame is None else frame.read(_handle(cell, frame))


def write(cell: Cell, value: Arrays) -> None:
    """Replaces the value of a cell, by the rules of where the code runs."""
    state = current()
    frame = frames.current()
    if state is not None:
        state.write(cell, value)
    elif frame is None:
        cell.write(value)
    elif not _same_leaves(value, frame.read(_handle(cell, frame))):
        frame.write(_handle(cell, frame), _arrays(cell, value))


def commit() -> None:
    """Hands over what the replica that runs now has written so far."""
    state = current()
    if state is not None:
        state.commit()
        state.pending.clear()


def _handle(cell: Cell, frame: frames.Frame) -> Handle:
    here = context.current()
    in_replica = here.replica_context is not None and context.has_strategy()
    return cell.handle_in(frame, here.strategy if in_replica else None)


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
    """The cells' values in one replica of several."""

    def __init__(self) -> None:
        self.entry = context.current()
        assert self.entry.replica_context is not None
        self.replica = self.entry.replica_context
        self.strategy = self.entry.strategy
        frame = frames.current()
        self.frame = frame if isinstance(frame, frames.RunFrame) else None
        self.pending: dict[Cell, Any] = {}
        # The pending values that are known to be the same in every replica.
        self._same: set[Cell] = set()
        # Whether the code that runs now is given the same in every replica.
        self.is_together = False
        # What has been read, beside what it was made of: reading again gives the same object.
        self._pieces: dict[Cell, tuple[Any, Any]] = {}
        self._views: dict[Cell, tuple[Any, Any]] = {}

    # Reading and writing.

    def read(self, cell: Cell) -> Any:
        """Returns the replica's own value."""
        return self.pending[cell] if cell in self.pending else self._unwritten(cell)

    def _unwritten(self, cell: Cell) -> Any:
        stored = self._stored(cell)
        if self.is_together:
            return stored
        known = self._views.get(cell)
        if known is not None and known[0] is stored:
            return known[1]
        own = self._own(cell, stored)
        if self._at_top_level():
            self._views[cell] = (stored, own)
        return own

    def write(self, cell: Cell, value: Arrays) -> None:
        """Replaces the replica's own value."""
        self._same.discard(cell)
        if _same_leaves(value, self._unwritten(cell)):
            # Libraries write back what a function has not changed, or what they had set aside.
            self.pending.pop(cell, None)
            return
        self.pending[cell] = _arrays(cell, value)
        if self.is_together:
            self._same.add(cell)

    def _stored(self, cell: Cell) -> Any:
        if self.frame is not None:
            return self.frame.read(cell.handle_in(self.frame, self.strategy))
        cell.owner = self.strategy
        placement = cell.handle(self.strategy).placement
        source = cell.place(placement)
        known = self._pieces.get(cell)
        if known is None or known[0] is not source:
            known = self._pieces[cell] = (source, cell.piece(self.replica.runner.copy_id))
        return known[1]

    def _own(self, cell: Cell, stored: Arrays) -> Any:
        if cell.rule.view is None or self.replica.num_replicas_in_sync == 1:
            return stored
        return cell.rule.view(stored, self.replica.replica_id_in_sync_group)

    def _at_top_level(self) -> bool:
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
            leaves[index] = self._shared(value)
        return jax.tree.unflatten(tree, leaves)

    def _shared(self, value: jax.Array) -> jax.Array:
        return value if self.frame is None else self.frame.find_shared(value)[0]

    def settle(self) -> None:
        """Makes the pending values one for all replicas, by the rules of their cells."""
        unsettled = self.unsettled()
        if not unsettled:
            return
        if self.is_idle:
            self._take_back(unsettled)
        cells, values = self.replica.merge_call(_combine, args=(self,))
        for cell, leaves in zip(cells, values, strict=True):
            old, tree = jax.tree.flatten(self.pending[cell])
            new = [_like(self._shared(leaf), was) for leaf, was in zip(leaves, old, strict=True)]
            self.pending[cell] = jax.tree.unflatten(tree, new)
            self._same.add(cell)

    @property
    def is_idle(self) -> bool:
        """Whether the replica's piece of the batch is empty, so that it has seen no example."""
        return self.replica.runner.is_idle

    def _take_back(self, cells: list[Cell]) -> None:
        """Makes the replica's parts of sums what they were before it ran."""
        for cell in cells:
            if cell.rule.aggregation is _SUM:
                self.pending[cell] = _arrays(cell, self._unwritten(cell))

    def unsettled(self) -> list[Cell]:
        """Returns the cells whose pending values may differ between replicas."""
        if self.replica.num_replicas_in_sync == 1:
            return []
        return [
            cell
            for cell in self.pending
            if cell not in self._same and cell.rule.aggregation is not VariableAggregation.NONE
        ]

    def commit(self) -> None:
        """Hands the pending values over to the cells."""
        self.settle()
        if not self.pending:
            return
        if self.frame is None:
            self.replica.merge_call(_store, args=(self,))
            return
        for cell, value in self.pending.items():
            self.frame.write(cell.handle_in(self.frame, self.strategy), value)


# What the replicas do together, outside of them.


def _combine(
    strategy: contracts.Strategy, states: PerReplica | ReplicaState
) -> tuple[tuple[Cell, ...], list[list[Any]]]:
    replicas = _replicas(states)
    if isinstance(states, PerReplica):
        # All processes are here, so that they can tell each other.
        states.idle.find()
    cells = tuple(replicas[0].unsettled())
    values: list[list[Any]] = [[] for _ in cells]
    reduced: dict[ReduceOp, list[tuple[int, int, Any]]] = {ReduceOp.SUM: [], ReduceOp.MEAN: []}
    for index, cell in enumerate(cells):
        for leaves in _leaves(cell, replicas):
            op = _operation(cell, leaves[0])
            if op is None:
                values[index].append(_first(strategy, leaves, replicas[0].frame))
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
    return cells, values


def _store(strategy: contracts.Strategy, states: PerReplica | ReplicaState) -> None:
    replicas = _replicas(states)
    for cell in replicas[0].pending:
        cell.keep_pieces(
            [replica.pending[cell] for replica in replicas], cell.handle(strategy).placement
        )


def _replicas(states: PerReplica | ReplicaState) -> list[ReplicaState]:
    replicas = list(states.values) if isinstance(states, PerReplica) else [states]
    first = replicas[0].pending.keys()
    for replica_id, replica in enumerate(replicas):
        if replica.pending.keys() != first:
            odd = sorted(cell.name for cell in replica.pending.keys() ^ first)
            raise RuntimeError(
                f"strategy.run: replica {replica_id} has written other variables than replica 0: "
                f"{', '.join(odd)}. Every replica must write the same variables; do not put a "
                "write under a condition that differs between replicas."
            )
    return replicas


def _leaves(cell: Cell, replicas: list[ReplicaState]) -> Iterator[tuple[Any, ...]]:
    """Yields the replicas' values of each array of a cell."""
    flat: list[tuple[list[Any], Any]] = [
        jax.tree.flatten(replica.pending[cell]) for replica in replicas
    ]
    shapes = [[jnp.shape(leaf) for leaf in leaves] for leaves, _ in flat]
    if any(tree != flat[0][1] for _, tree in flat) or any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"strategy.run: the replicas have written values of different form to {cell.name}: "
            f"shapes {shapes}, by replica. State that replicas share cannot depend on the size of "
            "a replica's batch; return such a value from the replica instead."
        )
    return zip(*(leaves for leaves, _ in flat), strict=True)


def _operation(cell: Cell, leaf: jax.Array) -> ReduceOp | None:
    """Returns how an array of a cell is combined; None means that the first replica's is taken."""
    if cell.rule.aggregation is _SUM and jnp.issubdtype(leaf.dtype, jnp.number):
        return ReduceOp.SUM
    has_mean = cell.rule.aggregation is _MEAN and jnp.issubdtype(leaf.dtype, jnp.inexact)
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


def _first(
    strategy: contracts.Strategy, leaves: tuple[jax.Array, ...], frame: frames.RunFrame | None
) -> Any:
    if jax_private.is_key(leaves[0]):
        leaves = tuple(jax.random.key_data(leaf) for leaf in leaves)
    return strategy.extended.first_value(_wrap(leaves, frame), None)


def _like(value: jax.Array, old: jax.Array) -> jax.Array:
    """Returns a combined value as what it was before it was combined: a random key, or a number."""
    if jax_private.is_key(old):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(old))
    return value


def _same_leaves(value: Arrays, known: Arrays) -> bool:
    new, old = jax.tree.leaves(value), jax.tree.leaves(known)
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _arrays(cell: Cell, value: Arrays) -> Any:
    return jax.tree.map(lambda leaf: _array(cell, leaf), value)


def _array(cell: Cell, leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        return jnp.asarray(leaf)
    raise TypeError(
        f"{cell.name} was given {leaf!r} in a replica, which is not an array. State that replicas "
        "write consists of arrays and numbers; set anything else outside of strategy.run()."
    )

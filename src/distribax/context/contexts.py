"""The stack of contexts: who is in charge of the code that runs now, and what a replica can do.

The stack is a `ContextVar`: each thread starts with an empty one (the default strategy), and a
scope entered in a thread is seen by that thread alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.collectives.indexed_rows import refuse_slices
from distribax.context.replica_id import ReplicaId
from distribax.types import CommunicationOptions, ReduceOp, is_integer
from distribax.values import IndexedSlices, is_slices, is_wrapped, nests

_S = TypeVar("_S", bound=contracts.Strategy)


@dataclass(frozen=True, eq=False)
class Entry:
    """One context: a strategy, and the replica (or the copy being updated) if there is one."""

    strategy: contracts.Strategy
    replica_context: ReplicaContext | None = None
    # The index of the copy that `extended.update` works on, or None outside `update`.
    copy_id: int | None = None


_stack: ContextVar[tuple[Entry, ...]] = ContextVar("distribax_contexts", default=())
_set_by_hand: ContextVar[Entry | None] = ContextVar("distribax_set_strategy", default=None)
_default: Entry | None = None


def register_default(strategy: contracts.Strategy, replica_context: ReplicaContext) -> None:
    """Names the strategy that is current when no other is in scope."""
    global _default
    _default = Entry(strategy, replica_context)


def current() -> Entry:
    """Returns the innermost context."""
    stack = _stack.get()
    if stack:
        return stack[-1]
    here = _set_by_hand.get() or _default
    assert here is not None, "the package registers a default strategy"
    return here


class _Entered:
    """Makes an entry the innermost context, in a `with` block."""

    # Not a generator: each function on a worker enters one, and some take less time than that.

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._tokens: list[Token[tuple[Entry, ...]]] = []

    def __enter__(self) -> None:
        # In another context a variable has another value.
        jax_private.forget_closures()
        self._tokens.append(_stack.set((*_stack.get(), self._entry)))

    def __exit__(self, *error: object) -> None:
        jax_private.forget_closures()
        _stack.reset(self._tokens.pop())


def enter(entry: Entry) -> _Entered:
    """Returns a context manager that makes `entry` the innermost context."""
    return _Entered(entry)


class Scope(contextlib.ContextDecorator, Generic[_S]):
    """Enters the cross-replica context of `strategy`, as `strategy.scope()` does."""

    def __init__(self, strategy: _S) -> None:
        self._strategy = strategy
        # The default strategy has no other context than that of its replica.
        is_default = _default is not None and strategy is _default.strategy
        self._entry = enter(_default if is_default else Entry(strategy))  # type: ignore[arg-type]

    def __enter__(self) -> _S:
        strategy, here = self._strategy, current()
        if here.strategy is not strategy and (here is not _default or _stack.get()):
            raise RuntimeError(
                f"strategy.scope(): {name_strategy(strategy)} cannot be entered inside the scope "
                f"of another strategy, {name_strategy(here.strategy)}. Leave that scope first "
                "(end its `with` block, or call dx.experimental_set_strategy(None))."
            )
        if here.replica_context is not None and here is not _default:
            raise RuntimeError(
                f"strategy.scope(): {name_strategy(strategy)} is running a replica here. Enter the "
                "scope outside strategy.run(); inside a replica use "
                "dx.get_replica_context().merge_call(fn) to get to the cross-replica context."
            )
        self._entry.__enter__()
        return strategy

    def __exit__(self, *error: object) -> None:
        self._entry.__exit__(*error)


def get_strategy() -> contracts.Strategy:
    """Returns the current strategy; a default one when none is in scope."""
    return current().strategy


def has_strategy() -> bool:
    """Tells whether a strategy other than the default one is current."""
    return _default is None or current().strategy is not _default.strategy


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that runs now, or None in a cross-replica context."""
    return current().replica_context


def in_cross_replica_context() -> bool:
    """Tells whether the code runs once for all replicas, and not in one of them."""
    return current().replica_context is None


def experimental_set_strategy(strategy: contracts.Strategy | None) -> None:
    """Makes `strategy` current in this thread without a `with` block.

    Args:
        strategy: The strategy, or None to return to the default one.

    Raises:
        TypeError: `strategy` is not a strategy.
        RuntimeError: It is called inside `strategy.scope()` or `strategy.run()`.

    Example:
        >>> import distribax as dx
        >>> dx.experimental_set_strategy(dx.OneDeviceStrategy("CPU:0"))
        >>> dx.has_strategy()
        True
        >>> dx.experimental_set_strategy(None)
    """
    if _stack.get():
        raise RuntimeError(
            "experimental_set_strategy: it cannot be called inside strategy.scope() or "
            f"strategy.run() ({name_strategy(current().strategy)} is in charge here). Call it at "
            "the top level of the program, or use `with strategy.scope():` alone."
        )
    if strategy is not None and not isinstance(strategy, contracts.Strategy):
        raise TypeError(
            f"experimental_set_strategy: strategy={strategy!r} is not a strategy. Pass one, for "
            "example dx.MirroredStrategy(), or None for the default one."
        )
    is_default = _default is not None and strategy in (None, _default.strategy)
    _set_by_hand.set(None if is_default else Entry(strategy))  # type: ignore[arg-type]


def get_loss_reduction() -> ReduceOp:
    """Returns how the replicas' losses are combined: SUM, as losses are scaled already."""
    return ReduceOp.SUM


def require_cross_replica(strategy: contracts.Strategy, what: str) -> None:
    """Raises unless `what` may be called now: outside replicas and other strategies' scopes."""
    here = current()
    if here.strategy is not strategy:
        if here is _default:
            return
        raise RuntimeError(
            f"{what}: called on {name_strategy(strategy)} inside the scope of "
            f"{name_strategy(here.strategy)}. Call it on dx.get_strategy(), or outside that scope."
        )
    if here.replica_context is not None and here is not _default:
        raise RuntimeError(
            f"{what}: needs the cross-replica context, but was called inside a replica of "
            f"{name_strategy(strategy)}. Call it after strategy.run(), or use "
            f"dx.get_replica_context().merge_call(lambda strategy, x: ..., args=(x,)), "
            "all_reduce() or all_gather()."
        )


def name_strategy(strategy: contracts.Strategy) -> str:
    """Returns the name of a strategy in messages."""
    return type(strategy).__name__


class ReplicaContext:
    """The `Strategy` interface inside a replica.

    Do not create one: `dx.get_replica_context()` returns it inside the function that is given to
    `strategy.run`.

    Args:
        strategy: The strategy that runs the replica.
        runner: The way the replicas are run.
    """

    def __init__(self, strategy: contracts.Strategy, runner: contracts.Runner) -> None:
        self._strategy = strategy
        self._runner = runner
        self._entered: contextlib.ExitStack | None = None

    @property
    def strategy(self) -> Any:
        """The current strategy."""
        return self._strategy

    @property
    def compiles(self) -> bool:
        """Whether a `dx.function` that is called in this replica compiles by itself."""
        return self._runner.compiles

    @property
    def runner(self) -> contracts.Runner:
        """The way the replicas are run."""
        return self._runner

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose results are combined."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """The index of this replica; what is computed with it is a value of the replica's own.

        In eager code it is also an int: it counts, indexes and hashes, and `if` takes its
        comparisons. While `dx.function` compiles several replicas, it is a traced int32 scalar:
        write `jnp.where(replica_id == 0, a, b)` or `jax.lax.cond` instead of `if`.
        """
        self._require_current("replica_id_in_sync_group")
        found = self._runner.replica_id
        return ReplicaId(found) if isinstance(found, int) else found

    @property
    def replica_id(self) -> int | jax.Array:
        """An older name of `replica_id_in_sync_group`."""
        return self.replica_id_in_sync_group

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that this replica runs on."""
        self._require_current("devices")
        devices = self._strategy.extended.worker_devices
        if not isinstance(self._runner.replica_id, int):
            return tuple(devices)
        # Over several workers, the names are of this one's devices.
        return (devices[self._runner.copy_id],)

    def merge_call(
        self,
        merge_fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Meets the other replicas and runs `merge_fn(strategy, *args)` once for all of them.

        Args:
            merge_fn: A function that takes the strategy first. Each further argument reaches it as
                the values of all replicas (a `PerReplica`).
            args: This replica's arguments of `merge_fn`.
            kwargs: This replica's keyword arguments of `merge_fn`.

        Returns:
            This replica's part of what `merge_fn` returns.

        Raises:
            TypeError: `merge_fn` is not callable.
            RuntimeError: This is not the context of the replica that runs now, or the replicas do
                not make the same calls.
        """
        self._require_current("merge_call")
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call: merge_fn={merge_fn!r} is not callable. Expected a function that "
                "takes the strategy first, such as lambda strategy, x: strategy.reduce('SUM', x)."
            )
        return self._runner.merge(merge_fn, tuple(args), dict(kwargs or {}))

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines `value`, leaf by leaf, over all replicas; each replica gets the result.

        Gradients flow through it: the gradient of a sum is the sum of the gradients.

        Args:
            reduce_op: SUM or MEAN.
            value: This replica's value: an array, or a nest of arrays. A `dx.IndexedSlices` in it
                is combined row by row: the result has the rows of all replicas.
            options: Hints for the collectives; see `dx.CommunicationOptions`.

        Returns:
            The combined value, of the same structure.

        Raises:
            ValueError: `reduce_op` is unknown.
            RuntimeError: This is not the context of the replica that runs now.
        """
        self._require_current("all_reduce")
        op = ReduceOp.parse(reduce_op, "reduce_op")
        leaves, tree = nests.flatten(value, is_slices, of_results=True)
        sparse = [leaf for leaf in leaves if is_slices(leaf)]
        dense = [_as_own(leaf) for leaf in leaves if not is_slices(leaf)]
        reduced = iter(self._runner.all_reduce(op, dense, options) if dense else ())
        joined = iter(self._join_rows(op, sparse, options) if sparse else ())
        return jax.tree.unflatten(
            tree, [next(joined if is_slices(leaf) else reduced) for leaf in leaves]
        )

    def _join_rows(
        self,
        op: ReduceOp,
        slices: Sequence[IndexedSlices],
        options: CommunicationOptions | None,
    ) -> list[IndexedSlices]:
        """Combines rows with numbers: those of all replicas, where equal numbers add up."""
        count = self.num_replicas_in_sync if op is ReduceOp.MEAN else None
        own = [each if count is None else each / count for each in slices]
        # Apart: gradients flow through the rows, and integers have none.
        values = self._runner.all_gather([jnp.asarray(each.values) for each in own], 0, options)
        indices = self._runner.all_gather([jnp.asarray(each.indices) for each in own], 0, options)
        shapes = [each.dense_shape for each in own]
        return list(map(IndexedSlices, values, indices, shapes))

    def all_gather(
        self, value: object, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Concatenates `value`, leaf by leaf, over all replicas along `axis`.

        The other dimensions must agree; the size along `axis` may differ on the eager path.

        Args:
            value: This replica's value: an array, or a nest of arrays.
            axis: The dimension along which the values are joined.
            options: Hints for the collectives; see `dx.CommunicationOptions`.

        Returns:
            The joined value, of the same structure.

        Raises:
            ValueError: `axis` is not a dimension of the value.
            NotImplementedError: The value has a `dx.IndexedSlices`.
            RuntimeError: This is not the context of the replica that runs now.
        """
        self._require_current("all_gather")
        leaves, tree = nests.flatten(value, is_slices, of_results=True)
        for leaf in leaves:
            refuse_slices(leaf, "all_gather")
        leaves = [_as_own(leaf) for leaf in leaves]
        for leaf in leaves:
            _check_gather_axis(leaf, axis)
        return jax.tree.unflatten(tree, self._runner.all_gather(leaves, axis, options))

    def _require_current(self, what: str) -> None:
        if current().replica_context is not self:
            raise RuntimeError(
                f"{what}: this replica context of {name_strategy(self._strategy)} is not the "
                "current one. Ask dx.get_replica_context() inside the function given to "
                "strategy.run(), and do not keep the object for later."
            )

    def __enter__(self) -> Self:
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(enter(Entry(self._strategy, self)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._entered is not None
        self._entered.close()
        self._entered = None

    @override
    def __repr__(self) -> str:
        return f"<distribax.ReplicaContext of {name_strategy(self._strategy)}>"


def _as_own(leaf: Any) -> Any:
    """Returns the replica's part of a value that it has not been given, but found."""
    return jnp.asarray(leaf) if is_wrapped(leaf) else leaf


def _check_gather_axis(value: jax.typing.ArrayLike, axis: object) -> None:
    shape = jax.numpy.shape(value)
    if not is_integer(axis) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"all_gather: axis={axis!r} does not fit a value of shape {tuple(shape)}. Expected an "
            f"int from {-len(shape)} to {len(shape) - 1}; a scalar has no axis to gather along, "
            "give it one with x[None]."
        )

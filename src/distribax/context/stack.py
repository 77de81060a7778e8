"""The stack of contexts: who is in charge of the code that runs now.

The stack is a `ContextVar`: each thread starts with an empty one (the default strategy), and a
scope entered in a thread is seen by that thread alone.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from distribax.types import ReduceOp


@dataclass(frozen=True, eq=False)
class Entry:
    """One context: a strategy, and the replica (or the copy being updated) if there is one."""

    strategy: Any
    replica_context: Any = None
    # The index of the copy that `extended.update` works on, or None outside `update`.
    copy_id: int | None = None


_stack: ContextVar[tuple[Entry, ...]] = ContextVar("distribax_contexts", default=())
_set_by_hand: ContextVar[Entry | None] = ContextVar("distribax_set_strategy", default=None)
_default: list[Entry] = []


def register_default(strategy: Any, replica_context: Any) -> None:
    """Names the strategy that is current when no other is in scope."""
    _default[:] = [Entry(strategy, replica_context)]


def current() -> Entry:
    """Returns the innermost context."""
    stack = _stack.get()
    if stack:
        return stack[-1]
    return _set_by_hand.get() or _default[0]


class enter(contextlib.ContextDecorator):
    """Makes `entry` the innermost context."""

    # Not a generator: functions on workers enter one each, and that would cost more than some do.

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._tokens: list[Token[tuple[Entry, ...]]] = []

    def __enter__(self) -> Any:
        self._tokens.append(_stack.set((*_stack.get(), self._entry)))
        return self._entry

    def __exit__(self, *error: object) -> None:
        _stack.reset(self._tokens.pop())


class enter_scope(enter):
    """Enters the cross-replica context of `strategy`, as `strategy.scope()` does."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(Entry(strategy))

    def __enter__(self) -> Any:
        strategy, here = self._entry.strategy, current()
        if here.strategy is not strategy and here is not _default[0]:
            raise RuntimeError(
                f"strategy.scope(): {_name(strategy)} cannot be entered inside the scope of "
                f"another strategy, {_name(here.strategy)}. Leave that scope first (end its `with` "
                "block, or call dx.experimental_set_strategy(None))."
            )
        if here.replica_context is not None and here is not _default[0]:
            raise RuntimeError(
                f"strategy.scope(): {_name(strategy)} is running a replica here. Enter the scope "
                "outside strategy.run(); inside a replica use "
                "dx.get_replica_context().merge_call(fn) to get to the cross-replica context."
            )
        super().__enter__()
        return strategy


def get_strategy() -> Any:
    """Returns the current strategy; a default one when none is in scope."""
    return current().strategy


def has_strategy() -> bool:
    """Tells whether a strategy other than the default one is current."""
    return current().strategy is not _default[0].strategy


def get_replica_context() -> Any:
    """Returns the context of the replica that runs now, or None in a cross-replica context."""
    return current().replica_context


def in_cross_replica_context() -> bool:
    """Tells whether the code runs once for all replicas, and not in one of them."""
    return current().replica_context is None


def experimental_set_strategy(strategy: Any) -> None:
    """Makes `strategy` current in this thread without a `with` block; None takes it back.

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
            f"strategy.run() ({_name(current().strategy)} is in charge here). Call it at the top "
            "level of the program, or use `with strategy.scope():` alone."
        )
    _set_by_hand.set(None if strategy is None else Entry(strategy))


def get_loss_reduction() -> ReduceOp:
    """Returns how the replicas' losses are combined: SUM, as losses are scaled already."""
    return ReduceOp.SUM


def require_cross_replica(strategy: Any, what: str) -> None:
    """Raises unless `what` may be called now: outside replicas and other strategies' scopes."""
    here = current()
    if here.strategy is not strategy:
        if here is _default[0]:
            return
        raise RuntimeError(
            f"{what}: called on {_name(strategy)} inside the scope of {_name(here.strategy)}. "
            f"Call it on dx.get_strategy(), or outside that scope."
        )
    if here.replica_context is not None and here is not _default[0]:
        raise RuntimeError(
            f"{what}: needs the cross-replica context, but was called inside a replica of "
            f"{_name(strategy)}. Call it after strategy.run(), or use "
            f"dx.get_replica_context().merge_call(lambda strategy, x: ..., args=(x,)), "
            "all_reduce() or all_gather()."
        )


def require_replica(replica_context: Any, what: str) -> None:
    """Raises unless `replica_context` is the one that runs now."""
    if current().replica_context is replica_context:
        return
    raise RuntimeError(
        f"{what}: this replica context of {_name(replica_context.strategy)} is not the current "
        "one. Ask dx.get_replica_context() inside the function given to strategy.run(), and do "
        "not keep the object for later."
    )


def _name(strategy: Any) -> str:
    return type(strategy).__name__

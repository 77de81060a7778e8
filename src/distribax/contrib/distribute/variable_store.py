"""The names that `get_variable` knows: one store for each strategy, and scopes of names."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from typing_extensions import override

from distribax import context
from distribax.execution import frames
from distribax.variables import Variable


class _ReuseMode(enum.Enum):
    AUTO_REUSE = "AUTO_REUSE"


AUTO_REUSE = _ReuseMode.AUTO_REUSE
"""Makes a variable on the first request of its name, and returns it on later ones."""

Reuse: TypeAlias = bool | _ReuseMode

Initializer: TypeAlias = "jax.typing.ArrayLike | Sequence[object] | Callable[..., Any]"
"""An initial value, or a function that makes it."""


class VariableScope:
    """A prefix of variable names, and what holds for the variables under it.

    Args:
        name: The prefix.
        reuse: Whether names must be new (False), known (True), or either (`AUTO_REUSE`).
        initializer: What makes initial values where `get_variable` is not told.
        dtype: The data type where `get_variable` is not told.
    """

    def __init__(
        self,
        name: str,
        reuse: Reuse = False,
        initializer: Initializer | None = None,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> None:
        self.name = name
        self.reuse = reuse
        self.initializer = initializer
        self.dtype = dtype

    def reuse_variables(self) -> None:
        """Asks for known names only, from now on."""
        self.reuse = True

    def full_name(self, name: str) -> str:
        """Returns a name with the prefix.

        Args:
            name: A name below this scope.

        Returns:
            The whole name.
        """
        return f"{self.name}/{name}" if self.name and name else self.name or name

    @override
    def __repr__(self) -> str:
        return f"<VariableScope {self.name!r}, reuse={self.reuse}>"


@dataclass(frozen=True, eq=False)
class Pass:
    """One run of a function that may run again: a tower function, or a trace of a `dx.function`.

    Where TensorFlow built a graph once and ran it often, the function itself runs at every step.
    So a name must be new only within a pass: the next one finds what the first has made.

    Attributes:
        code: What two runs of the same function have in common; None for a trace outside of
            towers, whose function is not known.
        instance: The object whose method it is.
        around: The pass that this one is a part of.
        trace: Finds the trace that the run is a part of.
    """

    code: Any = None
    instance: Any = None
    around: Pass | None = None
    trace: Callable[[], frames.Frame | None] = lambda: None

    def has_made(self, birth: Pass) -> bool:
        """Tells whether a variable of that pass was made by an earlier run of this function."""
        here: Pass | None = self
        while here is not None:
            if here is birth:
                return False
            here = here.around
        return birth.code is None or (birth.code is self.code and birth.instance is self.instance)


@dataclass(frozen=True, eq=False)
class NamedVariable:
    """A variable, and the pass that made it (None for code that runs once)."""

    variable: Variable
    birth: Pass | None


@dataclass(eq=False)
class VariableStore:
    """The variables that were made under one strategy, by name."""

    entries: dict[str, NamedVariable] = field(default_factory=dict)
    root: VariableScope = field(default_factory=lambda: VariableScope(""))


_ATTRIBUTE = "_distribax_variable_store"
_store: ContextVar[VariableStore | None] = ContextVar("distribax_variable_store", default=None)
_scope: ContextVar[VariableScope | None] = ContextVar("distribax_variable_scope", default=None)
_pass: ContextVar[Pass | None] = ContextVar("distribax_pass", default=None)
_traces: weakref.WeakKeyDictionary[frames.Frame, Pass] = weakref.WeakKeyDictionary()
_ONCE = Pass("the code outside of any pass")


@contextlib.contextmanager
def use_fresh_store() -> Iterator[None]:
    """Lets no name be known inside, as in a new graph."""
    tokens = _store.set(VariableStore()), _scope.set(None)
    try:
        yield
    finally:
        _store.reset(tokens[0])
        _scope.reset(tokens[1])


def get_current_store() -> VariableStore:
    """Returns the store of the current strategy, or of the graph that is being built."""
    fresh = _store.get()
    if fresh is not None:
        return fresh
    # Kept by the strategy, so that both end together.
    return vars(context.get_strategy()).setdefault(_ATTRIBUTE, VariableStore())


def reset_variable_store() -> None:
    """Forgets the names that were made under the current strategy, as a new graph would.

    The variables themselves stay as they are.
    """
    vars(context.get_strategy()).pop(_ATTRIBUTE, None)


def get_current_pass() -> Pass | None:
    """Returns the pass that the code is in, or None where code runs once."""
    inner, trace = _pass.get(), _find_trace()
    if trace is None or (inner is not None and inner.trace() is trace):
        return inner
    # A step that compiles by itself is traced inside the run, and maybe more than once.
    code, instance = (inner.code, inner.instance) if inner is not None else (None, None)
    return _traces.setdefault(trace, Pass(code, instance, inner))


def _find_trace() -> frames.Frame | None:
    frame = frames.current()
    return None if frame is None else frame.function


@contextlib.contextmanager
def mark_pass(fn: Callable[..., object]) -> Iterator[None]:
    """Marks one run of `fn` for all towers."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    code, instance = getattr(inner, "__code__", inner), getattr(inner, "__self__", None)
    trace = _find_trace()
    # Found weakly: variables remember their pass, and are not to keep a trace alive.
    found = (lambda: None) if trace is None else weakref.ref(trace)
    token = _pass.set(Pass(code, instance, get_current_pass(), found))
    try:
        yield
    finally:
        _pass.reset(token)


def is_own(entry: NamedVariable) -> bool:
    """Tells whether the code asks for what it made itself, when it ran before."""
    replica = context.get_replica_context()
    index = replica.runner.replica_id if replica is not None else 0
    if isinstance(index, int) and index > 0:
        # The first tower has made it, for all of them.
        return True
    return entry.birth is not None and (get_current_pass() or _ONCE).has_made(entry.birth)


def get_variable_scope() -> VariableScope:
    """Returns the current scope of variable names."""
    return _scope.get() or get_current_store().root


def check_reuse(reuse: Reuse | None, what: str) -> Reuse | None:
    """Returns `reuse` if it is one of the modes."""
    if reuse is None or isinstance(reuse, (bool, _ReuseMode)):
        return reuse
    raise ValueError(
        f"{what}: reuse={reuse!r} is not a mode. Expected True (the variable exists), False (it "
        "does not), AUTO_REUSE (make it if it does not), or None (as the scope around it says)."
    )


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope,
    *,
    initializer: Initializer | None = None,
    reuse: Reuse | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Iterator[VariableScope]:
    """Puts a prefix before the names of variables, and says whether names may be known already.

    Scopes nest, and a scope inside one that reuses variables reuses them too. A `VariableScope`
    that was left is entered again as it is, wherever the code is.

    Args:
        name_or_scope: The prefix below the current scope, or a scope that was entered before.
        initializer: What makes initial values where `get_variable` is not told.
        reuse: Whether names must be new (False), known (True), or either (`AUTO_REUSE`); None asks
            the scope around it.
        dtype: The data type where `get_variable` is not told.

    Yields:
        The scope.

    Raises:
        TypeError: `name_or_scope` is neither a name nor a scope.
        ValueError: `reuse` is not a mode.

    Example:
        >>> from distribax.contrib import distribute
        >>> with distribute.variable_scope("layer", reuse=distribute.AUTO_REUSE) as scope:
        ...     first = distribute.get_variable("w", shape=(2, 3))
        ...     again = distribute.get_variable("w", shape=(2, 3))
        >>> first is again, first.name
        (True, 'layer/w:0')
        >>> distribute.reset_variable_store()
    """
    given = check_reuse(reuse, "variable_scope")
    if isinstance(name_or_scope, VariableScope):
        outer, name = name_or_scope, name_or_scope.name
    elif isinstance(name_or_scope, str):
        outer = get_variable_scope()
        name = outer.full_name(name_or_scope)
    else:
        raise TypeError(
            f"variable_scope: name_or_scope={name_or_scope!r} is a {type(name_or_scope).__name__}. "
            "Expected a name, or a scope that `with variable_scope(...) as scope:` has given."
        )
    inner = VariableScope(
        name,
        given or outer.reuse,
        outer.initializer if initializer is None else initializer,
        outer.dtype if dtype is None else dtype,
    )
    token = _scope.set(inner)
    try:
        yield inner
    finally:
        _scope.reset(token)

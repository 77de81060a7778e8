"""Frames: where the values of variables live while a step is traced.

Outside a trace a variable has a buffer. While `dx.function` traces, reads and writes go to a frame:
the reads become inputs of the compiled program, the writes its outputs, and the buffers stay as
they are until the program has run.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.errors import NeedsOwnMesh
from distribax.execution.remote_writes import RemoteWrites
from distribax.types import WriteKind

_T = TypeVar("_T")


class Frame(abc.ABC):
    """The values of the variables at one level of a trace.

    A value is an array, or a nest of arrays for the state of another library.
    """

    def __init__(self, parent: Frame | None) -> None:
        self.parent = parent
        self.values: dict[contracts.State, Any] = {}
        self.written: dict[contracts.State, None] = {}
        self.trace = jax_private.get_innermost_trace()

    @property
    def function(self) -> FunctionFrame:
        """The frame of the whole compiled function."""
        assert self.parent is not None
        return self.parent.function

    @abc.abstractmethod
    def read(self, state: contracts.State) -> Any:
        """Returns the value of a variable at this level."""

    def write(self, state: contracts.State, value: object) -> None:
        """Replaces the value of a variable at this level."""
        self._check_owned(state.described, value)
        self.values[state] = value
        self.written[state] = None

    def _check_owned(self, described: str, value: object) -> None:
        if not jax_private.is_tracer(value):
            return
        owner = jax_private.get_trace(value)
        frame: Frame | None = self
        while frame is not None:
            if owner is frame.trace:
                return
            frame = frame.parent
        raise RuntimeError(
            f"assign: {described} was assigned inside a JAX transformation (jax.jit, "
            "jax.lax.scan, jax.lax.cond, jax.vmap) whose values cannot leave it. Return the new "
            "value from the transformed function, and assign it outside."
        )


class FunctionFrame(Frame):
    """The frame of one `dx.function` trace: global arrays, one for each variable.

    Args:
        lifted: The values of the variables that are inputs of the program.
        allow_creation: Whether the function may create variables.
        device: The device of a one-device strategy that the function's code runs on, if known.
        has_stages: Whether rows of tables in other processes can be looked up: see `row_lookups`.
    """

    def __init__(
        self,
        lifted: Mapping[contracts.State, Any],
        allow_creation: bool,
        device: jax.Device | None,
        has_stages: bool = False,
    ) -> None:
        super().__init__(None)
        self.values.update(lifted)
        self.lifted = lifted
        self.touched: dict[contracts.State, None] = {}
        self.allow_creation = allow_creation
        # The elements that the host has fetched for this call, in the order of their use, each
        # with its iterator.
        self.pulled: list[tuple[object, Any]] = []
        self.device = device
        # The mesh of the replicas that the function has run, if it has.
        self.mesh: Mesh | None = None
        self.has_stages = has_stages
        # What to do where variables of other processes live, after the step has run.
        self.deferred = RemoteWrites()

    @property
    @override
    def function(self) -> FunctionFrame:
        return self

    def defer(self, variable: contracts.Variable, kind: WriteKind, value: jax.Array) -> None:
        """Notes a write to a variable that lives in another process."""
        self._check_owned(variable.described, value)
        self.deferred.write(variable, kind, value)

    def defer_rows(
        self, table: contracts.Table, kind: WriteKind, indices: jax.Array, rows: jax.Array
    ) -> None:
        """Notes a write to some rows of a table that lives in another process."""
        self._check_owned(table.described, indices)
        self._check_owned(table.described, rows)
        self.deferred.write_rows(table, kind, indices, rows)

    @override
    def read(self, state: contracts.State) -> Any:
        return self.deferred.read_after(state, lambda: self._read_before(state))

    def _read_before(self, state: contracts.State) -> Any:
        self.touched[state] = None
        if state not in self.values:
            if isinstance(state.program_sharding, NamedSharding) and jax_private.has_mesh():
                raise NeedsOwnMesh
            # Not an input yet: its value is used as a constant, and the function is traced again.
            self.values[state] = state.program_value()
        return self.values[state]

    @override
    def write(self, state: contracts.State, value: object) -> None:
        self.touched[state] = None
        super().write(state, value)

    def rename(self, old: contracts.State, new: contracts.State) -> None:
        """Lets `new` take the place of `old` in this trace."""
        for named in (self.values, self.touched, self.written):
            if old in named:
                named[new] = named.pop(old)


@dataclass(frozen=True)
class _Shared:
    """A value that all replicas share; `own` is the object that stands for it in a replica."""

    own: object
    value: Any
    is_bare: bool


class RunFrame(Frame):
    """The frame of the replicas inside one compiled `strategy.run`: local values."""

    def __init__(self, parent: Frame, mesh: Mesh, local: Mapping[contracts.State, Any]) -> None:
        super().__init__(parent)
        self.mesh = mesh
        self.values.update(local)
        # By the id of the replica's object, which is kept so that its id stays its own.
        self._shared: dict[int, _Shared] = {}

    @override
    def read(self, state: contracts.State) -> Any:
        if state in self.values:
            self.function.touched[state] = None
            return self.values[state]
        assert self.parent is not None
        value = self.parent.read(state)
        if state.per_replica:
            # Not an input of this run yet, so it is traced again: only the type matters. The
            # replicas' values are stacked along dimension 0.
            value = jnp.zeros(value.shape[1:], value.dtype)
        else:
            # As a value of this program: JAX refuses `jnp.zeros_like` of one from outside.
            value = jax.tree.map(jnp.copy, value)
        if jax_private.get_innermost_trace() is self.trace:
            self.values[state] = value
        return value

    def give_shared(self, value: _T, *, bare: bool = False) -> _T:
        """Gives a replica a value that all replicas share, and remembers that they do.

        It is `bare` if it is one value and not a copy for each replica.
        """
        if not jax_private.is_tracer(value):
            return value
        # A new object: the same array may be known as something else, such as a variable's value.
        own: Any = jnp.copy(value)
        self._shared[id(own)] = _Shared(own, value, bare)
        return own

    def is_bare(self, value: object) -> bool:
        """Tells whether a replica's value is one that all share, with no copy for each."""
        known = self._shared.get(id(value))
        return known is not None and known.is_bare

    def is_shared(self, value: object) -> bool:
        """Tells whether a replica was given `value` as one that all replicas share."""
        return id(value) in self._shared

    def find_shared(self, value: Any) -> tuple[Any, bool]:
        """Returns the shared value that a replica's value stands for, and whether it is shared."""
        known = self._shared.get(id(value))
        if known is not None:
            return known.value, True
        return value, not jax_private.is_tracer(value)


_frame: ContextVar[Frame | None] = ContextVar("distribax_frame", default=None)


def current() -> Frame | None:
    """Returns the innermost frame, or None when nothing is being traced by `dx.function`."""
    return _frame.get()


@contextlib.contextmanager
def enter(frame: Frame | None) -> Iterator[None]:
    """Makes `frame` the innermost one."""
    token = _frame.set(frame)
    jax_private.forget_closures()
    try:
        yield
    finally:
        jax_private.forget_closures()
        _frame.reset(token)


def detach(value: Any) -> Any:
    """Returns `value` without its gradient, so that it can outlive a differentiated function."""
    if not jax_private.is_tracer(value):
        return value
    frame = current()
    if frame is not None and jax_private.get_trace(value) is frame.trace:
        # Nothing is differentiated here, and the value keeps what is known of its origin.
        return value
    return jax.lax.stop_gradient(value)

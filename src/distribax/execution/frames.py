"""Frames: where the values of variables live while a step is traced.

Outside a trace a variable has a buffer. While `dx.function` traces, reads and writes go to a frame:
the reads become inputs of the compiled program, the writes its outputs, and the buffers stay as
they are until the program has run.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from distribax import jax_private
from distribax.execution.remote_writes import Deferred
from distribax.types import WriteKind


class Lifted(Protocol):
    """What the engine needs of a variable."""

    @property
    def per_replica(self) -> bool: ...

    def program_value(self) -> Any: ...

    def store_program_value(self, value: Any) -> None: ...


class Frame(abc.ABC):
    """The values of the variables at one level of a trace."""

    def __init__(self, parent: Frame | None) -> None:
        self.parent = parent
        self.values: dict[Any, Any] = {}
        self.written: dict[Any, None] = {}
        self.trace = jax_private.get_innermost_trace()

    @property
    def function(self) -> FunctionFrame:
        """The frame of the whole compiled function."""
        assert self.parent is not None
        return self.parent.function

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """Returns the variable's value at this level."""

    def write(self, variable: Any, value: Any) -> None:
        """Replaces the variable's value at this level."""
        self._check_owned(variable, value)
        self.values[variable] = value
        self.written[variable] = None

    def _check_owned(self, variable: Any, value: Any) -> None:
        if not jax_private.is_tracer(value):
            return
        owner = jax_private.get_trace(value)
        frame: Frame | None = self
        while frame is not None:
            if owner is frame.trace:
                return
            frame = frame.parent
        raise RuntimeError(
            f"assign: {variable.described} was assigned inside a JAX transformation (jax.jit, "
            "jax.lax.scan, jax.lax.cond, jax.vmap) whose values cannot leave it. Return the new "
            "value from the transformed function, and assign it outside."
        )


class FunctionFrame(Frame):
    """The frame of one `dx.function` trace: global arrays, one for each variable."""

    def __init__(
        self,
        lifted: dict[Any, Any],
        allow_creation: bool,
        device: Any,
        has_stages: bool = False,
    ) -> None:
        super().__init__(None)
        self.values.update(lifted)
        self.lifted = lifted
        self.touched: dict[Any, None] = {}
        self.allow_creation = allow_creation
        # The elements that the host has fetched for this call, in the order of their use.
        self.pulled: list[tuple[Any, Any]] = []
        # The device of a one-device strategy, or the mesh, that the function's code runs on.
        self.device = device
        self.mesh: Mesh | None = None
        # Whether rows of tables in other processes can be looked up: see `stages`.
        self.has_stages = has_stages
        # What is to be done where variables of other processes live, once the step has run.
        self.deferred = Deferred()

    @property
    def function(self) -> FunctionFrame:
        return self

    def defer(self, variable: Any, kind: WriteKind, value: Any) -> None:
        """Notes a write to a variable that lives in another process."""
        self._check_owned(variable, value)
        self.deferred.write(variable, kind, value)

    def defer_rows(self, table: Any, kind: WriteKind, indices: Any, rows: Any) -> None:
        """Notes a write to some rows of a table that lives in another process."""
        self._check_owned(table, indices)
        self._check_owned(table, rows)
        self.deferred.write_rows(table, kind, indices, rows)

    def read(self, variable: Any) -> Any:
        return self.deferred.read_after(variable, lambda: self._before(variable))

    def _before(self, variable: Any) -> Any:
        self.touched[variable] = None
        if variable not in self.values:
            # Not an input yet: its value stands in as a constant, and the trace is made again.
            self.values[variable] = variable.program_value()
        return self.values[variable]

    def write(self, variable: Any, value: Any) -> None:
        self.touched[variable] = None
        super().write(variable, value)

    def rename(self, old: Any, new: Any) -> None:
        """Lets `new` stand for the state that `old` has stood for so far in this trace."""
        for named in (self.values, self.touched, self.written):
            if old in named:
                named[new] = named.pop(old)


class RunFrame(Frame):
    """The frame of the replicas inside one compiled `strategy.run`: local values."""

    def __init__(self, parent: Frame, mesh: Mesh, local: dict[Any, Any]) -> None:
        super().__init__(parent)
        self.mesh = mesh
        self.values.update(local)
        self._shared: dict[int, tuple[Any, Any, bool]] = {}

    def read(self, variable: Any) -> Any:
        if variable in self.values:
            self.function.touched[variable] = None
            return self.values[variable]
        assert self.parent is not None
        value = self.parent.read(variable)
        if variable.per_replica:
            # Not an input of this run yet, so the trace is made again: only the type matters.
            value = jnp.zeros(variable.shape, variable.dtype)
        else:
            # As a value of this program: JAX refuses `jnp.zeros_like` of one from outside.
            value = jax.tree.map(jnp.copy, value)
        if jax_private.get_innermost_trace() is self.trace:
            self.values[variable] = value
        return value

    def give_shared(self, value: Any, *, bare: bool = False) -> Any:
        """Gives a replica a value that all replicas share, and remembers that they do.

        It is `bare` if it is one value and not a copy for each replica.
        """
        if not jax_private.is_tracer(value):
            return value
        # A name of its own: the same array may be known as something else, a variable's value say.
        own = jnp.copy(value)
        self._shared[id(own)] = (own, value, bare)
        return own

    def is_bare(self, value: Any) -> bool:
        """Tells whether a replica's value is one that all share, with no copy for each."""
        known = self._shared.get(id(value))
        return known is not None and known[2]

    def find_shared(self, value: Any) -> tuple[Any, bool]:
        """Returns a replica's value, as the shared one where it is, and whether it is shared."""
        known = self._shared.get(id(value))
        if known is not None:
            return known[1], True
        return value, not jax_private.is_tracer(value)


_frame: ContextVar[Frame | None] = ContextVar("distribax_frame", default=None)


def current() -> Frame | None:
    """Returns the innermost frame, or None when nothing is being traced by `dx.function`."""
    return _frame.get()


@contextlib.contextmanager
def enter(frame: Frame | None) -> Iterator[None]:
    """Makes `frame` the innermost one."""
    token = _frame.set(frame)
    try:
        yield
    finally:
        _frame.reset(token)


def detach(value: Any) -> Any:
    """Returns `value` without its gradient, as it may be kept beyond a differentiated function."""
    if not jax_private.is_tracer(value):
        return value
    frame = current()
    if frame is not None and jax_private.get_trace(value) is frame.trace:
        # Nothing is differentiated here, and the value keeps what is known of its origin.
        return value
    return jax.lax.stop_gradient(value)

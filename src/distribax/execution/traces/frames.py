"""Frames: where the values of variables live while a step is traced.

Outside a trace a variable has a buffer. While `dx.function` traces, reads and writes go to a frame:
the reads become inputs of the compiled program, the writes its outputs, and the buffers stay as
they are until the program has run.
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.errors import NeedsOwnMesh
from distribax.execution.state.remote_writes import RemoteWrites
from distribax.execution.traces.variant import Variant
from distribax.jax_private import jaxprs
from distribax.topology import launch_lock
from distribax.types import WriteKind
from distribax.values import NONE_IDLE, IdleReplicas

_T = TypeVar("_T")

Array: TypeAlias = jax.Array | np.ndarray


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

    @abc.abstractmethod
    def evaluate(self, value: Array) -> Array | None:
        """Returns what a traced value is, given what the variables and arguments are now.

        None if it is a value of a JAX transformation inside the traced code.
        """

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

    A variable becomes an input of the program when it is first read.

    Args:
        recording: The program that is being traced.
        allow_creation: Whether the function may create variables.
        pull: Returns the next element of an iterator as an input of the program.
        captured: The distributed values that replicas find, and are not given, as far as known.
    """

    def __init__(
        self,
        recording: jax_private.Recording,
        allow_creation: bool,
        pull: Callable[[Any], Any],
        captured: dict[contracts.State, None],
    ) -> None:
        super().__init__(None)
        self._recording = recording
        # The variables that are inputs, with the values that stand for them.
        self.lifted: dict[contracts.State, Any] = {}
        # Those among them that the code has read.
        self.touched: dict[contracts.State, None] = {}
        self.allow_creation = allow_creation
        # Whether it has created any.
        self.has_created = False
        self.pull = pull
        self.captured = captured
        # The device of a one-device strategy that the function's code runs on, if it does.
        self.device: jax.Device | None = None
        # The mesh of the replicas that the function has run, if it has.
        self.mesh: Mesh | None = None
        # Whether there are parts that the host could run as compiled steps of their own.
        self.has_steps = False
        # The ids of the variables among the arguments whose identity the code has asked for.
        self.identified: set[int] = set()
        # Whether replicas have read a variable that was not among their inputs.
        self.is_incomplete = False
        # What to do where variables of other processes live, after the step has run.
        self.deferred = RemoteWrites()

    @property
    @override
    def function(self) -> FunctionFrame:
        return self

    def end(self) -> None:
        """Lets go of the call that the function was traced for."""
        self.pull = _refuse_pull

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
        return self.lift(state)

    def lift(self, state: contracts.State) -> Any:
        """Returns the value of a variable, which becomes an input if it has no value yet."""
        if state not in self.values:
            if isinstance(state.program_sharding, NamedSharding) and jax_private.has_mesh():
                raise NeedsOwnMesh
            types, tree = jax.tree.flatten(state.program_type())
            leaves = [self._add_input(state, place, type_) for place, type_ in enumerate(types)]
            self.values[state] = self.lifted[state] = jax.tree.unflatten(tree, leaves)
        return self.values[state]

    def _add_input(
        self, state: contracts.State, place: int, type_: jax_private.ArrayType
    ) -> jax.Array:
        return self._recording.add_input(
            type_, state.described, lambda: jax.tree.leaves(state.program_value())[place]
        )

    @override
    def evaluate(self, value: Array) -> Array | None:
        here = jaxprs.find_in_trace(value, self.trace)
        if not jax_private.is_tracer(here):
            return here
        with enter(None):
            return self._recording.evaluate(here)

    def rename(self, old: contracts.State, new: contracts.State) -> None:
        """Lets `new` take the place of `old` in this trace."""
        for named in (self.values, self.lifted, self.touched, self.written):
            if old in named:
                named[new] = named.pop(old)


def _refuse_pull(iterator: object) -> Any:
    raise AssertionError("the trace has ended")


@dataclass(frozen=True)
class _Shared:
    """A value that all replicas share; `own` is the object that stands for it in a replica."""

    own: object
    value: Any
    is_bare: bool


class RunFrame(Frame):
    """The frame of the replicas inside one compiled `strategy.run`: local values."""

    def __init__(
        self,
        parent: Frame,
        mesh: Mesh,
        local: Mapping[contracts.State, Any],
        inputs: Sequence[tuple[Array, PartitionSpec]],
        variant: Variant | None = None,
    ) -> None:
        super().__init__(parent)
        self.mesh = mesh
        # What goes into the replicas, and how it is divided among them.
        self._inputs = inputs
        # Which sizes of the replicas' pieces are being traced, if the sizes differ.
        self.variant = variant
        self.values.update(local)
        # By the id of the replica's object, which is kept so that its id stays its own.
        self._shared: dict[int, _Shared] = {}

    @property
    def idle(self) -> IdleReplicas:
        """The replicas whose piece of the batch is empty."""
        return NONE_IDLE if self.variant is None else IdleReplicas(self.variant.known.idle)

    @override
    def read(self, state: contracts.State) -> Any:
        if state in self.values:
            self.function.touched[state] = None
            return self.values[state]
        assert self.parent is not None
        value = self.parent.read(state)
        if state.per_replica:
            # The replicas' values, stacked along dimension 0, are no input of this run: the
            # variable was just created. The function is traced again, so only the type matters.
            self.function.is_incomplete = True
            value = jnp.zeros(value.shape[1:], value.dtype)
        else:
            # As a value of this program: JAX refuses `jnp.zeros_like` of one from outside.
            value = jax.tree.map(jnp.copy, value)
        if jax_private.get_innermost_trace() is self.trace:
            self.values[state] = value
        return value

    @override
    def evaluate(self, value: Array) -> Array | None:
        assert self.parent is not None
        here = jaxprs.find_in_trace(value, self.trace)
        if here is None:
            return self.parent.evaluate(value)
        if not jax_private.is_tracer(here):
            return here
        part = jax_private.cut_out(self.trace, here)
        used = [self._inputs[place] for place in part.inputs]
        known = [self.parent.evaluate(each) for each in part.constants]
        inputs = [self.parent.evaluate(each) for each, _ in used]
        whole = [PartitionSpec()] * len(known)
        replicas = jax_private.shard_map(
            lambda constants, inputs: [part.run(constants, inputs)],
            self.mesh,
            (whole, [spec for _, spec in used]),
            [PartitionSpec()],
        )
        # Variables are created by the first replica.
        with launch_lock:
            (result,) = jax_private.run_outside_trace(lambda: jax.jit(replicas)(known, inputs))
            return jax_private.pick_copy(result)

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


# The variables with a value in each replica, as long as they exist. A program over replicas takes
# such values in parts, so they must be its inputs before it is known which of them are used. The
# order is that of their creation, which is the same in all processes.
_per_replica: list[weakref.ref[contracts.State]] = []


def note_per_replica(state: contracts.State) -> None:
    """Notes a new variable with a value in each replica."""
    _per_replica.append(weakref.ref(state, _per_replica.remove))


def find_per_replica(sharding: Sharding) -> Sequence[contracts.State]:
    """Returns the variables with a value in each replica that have a sharding."""
    alive = [state for known in tuple(_per_replica) if (state := known()) is not None]
    return [state for state in alive if state.program_sharding == sharding]


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


def run_outside(fn: Callable[[], _T]) -> _T:
    """Runs `fn` as code that neither `dx.function` nor a JAX transformation is tracing."""
    with enter(None):
        return jax_private.run_outside_trace(fn)


def detach(value: Any) -> Any:
    """Returns `value` without its gradient, so that it can outlive a differentiated function."""
    if not jax_private.is_tracer(value):
        return value
    frame = current()
    if frame is not None and jax_private.get_trace(value) is frame.trace:
        # Nothing is differentiated here, and the value keeps what is known of its origin.
        return value
    return jax.lax.stop_gradient(jax_private.settle(value))

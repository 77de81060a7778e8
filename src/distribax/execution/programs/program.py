"""One compiled specialisation of a function: its inputs, its outputs, and how it is called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from distribax import contracts, jax_private
from distribax.errors import ControlFlow, HostMode, HostOnly, NeedsOwnMesh
from distribax.execution.calls import signature
from distribax.execution.calls.call import Call, rebuild
from distribax.execution.programs.results import Results, constrain
from distribax.execution.programs.row_lookups import LookupCall, ReadyCall
from distribax.execution.state.remote_writes import ProgramWrites
from distribax.execution.state.role_arguments import Exchange, RoleArgument
from distribax.execution.traces import frames, trace_errors
from distribax.execution.traces.iterators import LiftedIterator
from distribax.jax_private import jaxprs
from distribax.topology import launch_lock
from distribax.values import Form

"""Fetches values that live in another process."""


class TraceAgain(ControlFlow):
    """Ends a trace in which replicas have read variables that are not among their inputs."""


class Stale(ControlFlow):
    """Tells that a program does not fit the values of its variables any more."""


@dataclass(frozen=True)
class Lift:
    """The variables that a program takes as inputs, those that it replaces, and where it runs."""

    read: list[contracts.State]
    # Inputs that are replaced, so that their memory can be used for the new values.
    donated: list[contracts.State]
    # All that are replaced.
    written: list[contracts.State]
    device: jax.Device | None

    def is_same(self, other: Lift) -> bool:
        """Tells whether another one is about the same variables, in the same order."""
        mine, others = (
            [[id(state) for state in part] for part in (lift.read, lift.donated, lift.written)]
            for lift in (self, other)
        )
        return mine == others and self.device == other.device


@dataclass(frozen=True)
class Program:
    """A compiled function with what it reads and writes."""

    call: jax.stages.Wrapped | LookupCall
    lift: Lift
    results: Results
    writes: ProgramWrites
    donated: frozenset[int]
    # Whether it is for the mesh of replicas, whatever mesh the user has set.
    on_mesh: bool
    # Whether its trace has created variables, so that another one may do something else.
    has_created: bool
    # The ids of the variables whose identity the traced code has asked for.
    identified: frozenset[int]
    recorded: jax_private.Recorded
    name: str

    @functools.cached_property
    def is_exchangeable(self) -> bool:
        """Whether it is known of all that it reads, writes and returns which variable it is."""
        return (
            not self.has_created
            and all(isinstance(state, RoleArgument) for state in self.states)
            and self.results.is_exchangeable
        )

    @property
    def states(self) -> list[contracts.State]:
        """The variables that it reads or replaces in this process."""
        return [*self.lift.read, *self.lift.donated, *self.lift.written]

    def exchange(self, exchange: Exchange) -> Program:
        """Returns the same program with other variables."""
        read, donated, written = (
            [exchange(state) for state in part]
            for part in (self.lift.read, self.lift.donated, self.lift.written)
        )
        call = self.call
        return dataclasses.replace(
            self,
            call=call.exchange(exchange) if isinstance(call, LookupCall) else call,
            lift=dataclasses.replace(self.lift, read=read, donated=donated, written=written),
            results=self.results.exchange(exchange),
            writes=self.writes.exchange(exchange),
        )

    def does_same(self, other: Program) -> bool:
        """Tells whether another trace of the same code has led to the same computation."""
        sizes = [jax_private.count_operations(each.recorded) for each in (self, other)]
        return sizes[0] == sizes[1] and self.lift.is_same(other.lift)

    def __call__(self, dynamic: list[Any]) -> Any:
        if self.on_mesh and jax_private.has_mesh():
            with jax_private.leave_mesh():
                return self._call(dynamic)
        return self._call(dynamic)

    def _call(self, dynamic: list[Any]) -> Any:
        own, dynamic = _split(dynamic, self.donated)
        # What takes long, or waits for other processes, is done before the variables are held.
        far = self._fetch() if self._far_places else None
        if jax_private.joint_calls.is_watched:
            with self._record(dynamic) as joint:
                arrays, new, done = self._launch(own, far, dynamic, joint)
                joint.set_results((*new, *arrays))
        else:
            arrays, new, done = self._launch(own, far, dynamic, None)
        if done:
            self.writes.commit(done)
        return self.results.rebuild(arrays)

    def _launch(
        self,
        own: list[Any],
        far: list[Any] | None,
        dynamic: list[Any],
        joint: jax_private.JointCall | None,
    ) -> Any:
        """Starts the program with the values that its variables have now, and stores the new ones.

        No other thread may use the variables in between: the program overwrites their memory.
        """
        lift = self.lift
        with self._enter_device():
            call = self._prepare(own, far, dynamic)
            with launch_lock:
                given = [variable.take_program_value() for variable in lift.donated]
                read = self._read(far)
                if joint is not None:
                    # Workers may have agreed on the first values of variables just now.
                    joint.end_preparation()
                arrays, new, done = call(given, own, read, dynamic)
                for variable, value in zip(lift.written, new, strict=True):
                    variable.store_program_value(value)
        return arrays, new, done

    def compile(self, dynamic: list[Any]) -> None:
        """Compiles the program for some inputs, if it is one that fetches what it computes with.

        The first call would compile it after the fetch, and compute with values that are old by
        then.
        """
        if self._far_places or isinstance(self.call, LookupCall):
            self._lower(dynamic).compile()

    def lower(self, dynamic: list[Any]) -> jax.stages.Lowered:
        """Returns the program as JAX has it before it is compiled, for some inputs."""
        if isinstance(self.call, LookupCall):
            raise ValueError(
                f"lower: {self.name} looks up rows of tables on parameter servers, which is "
                "several programs. Lower the part that computes with the rows."
            )
        return self._lower(dynamic)

    def _lower(self, dynamic: list[Any]) -> jax.stages.Lowered:
        own, rest = _split(dynamic, self.donated)
        with (
            jax_private.leave_mesh() if self.on_mesh else contextlib.nullcontext(),
            self._enter_device(),
        ):
            far = self._fetch() if self._far_places else None
            call = self._prepare(own, far, rest)
            return call.lower(*self._peek(own, far, rest))

    def _prepare(
        self, own: list[Any], far: list[Any] | None, dynamic: list[Any]
    ) -> jax.stages.Wrapped | ReadyCall:
        """Returns what is called with the inputs, with the rows that it looks up."""
        if isinstance(self.call, LookupCall):
            return self.call.prepare(lambda: self._peek(own, far, dynamic))
        return self.call

    def _enter_device(self) -> contextlib.AbstractContextManager[Any]:
        device = self.lift.device
        return contextlib.nullcontext() if device is None else jax.default_device(device)

    def _peek(
        self, own: list[Any], far: list[Any] | None, dynamic: list[Any]
    ) -> tuple[list[Any], ...]:
        """Returns the inputs as they are now, which other threads may overwrite."""
        given = [variable.program_value() for variable in self.lift.donated]
        return given, own, self._read(far), dynamic

    def _record(
        self, dynamic: list[Any]
    ) -> contextlib.AbstractContextManager[jax_private.JointCall]:
        """Notes the call if all processes have to make it."""
        calls = jax_private.joint_calls
        if self._shares_variables:
            return calls.record(f"compiled {self.name}", is_prepared=False)
        return calls.record_for(lambda: f"compiled {self.name}", *dynamic, is_prepared=False)

    @functools.cached_property
    def _shares_variables(self) -> bool:
        variables = (*self.lift.written, *self.lift.read)
        shardings = [variable.program_sharding for variable in variables]
        return any(each is not None and not each.is_fully_addressable for each in shardings)

    @functools.cached_property
    def _far_places(self) -> dict[contracts.Source, list[int]]:
        """The places of the variables that other processes have, by where they are read from."""
        places: dict[contracts.Source, list[int]] = {}
        for place, variable in enumerate(self.lift.read):
            if variable.source is not None:
                places.setdefault(variable.source, []).append(place)
        return places

    def _fetch(self) -> list[Any]:
        """Returns the values of other processes, those of one source together, at their places."""
        read = self.lift.read
        values: list[Any] = [None] * len(read)
        for source, places in self._far_places.items():
            found = source.pull([read[place] for place in places])
            for place, value in zip(places, found, strict=True):
                values[place] = value
        return values

    def _read(self, far: list[Any] | None) -> list[Any]:
        """Returns the values that the program reads, given those of other processes."""
        read = self.lift.read
        if far is None:
            return [variable.program_value() for variable in read]
        return [
            variable.program_value() if variable.source is None else value
            for variable, value in zip(read, far, strict=True)
        ]


def build(
    fn: Callable[..., object],
    call: Call,
    *,
    may_create: bool,
    donated: frozenset[int] = frozenset(),
) -> Program:
    """Traces `fn` for a call, and returns the program, which is compiled when it is first called.

    Elements of iterators that `fn` asks for are fetched, and added to the call.
    """
    recording = jax_private.Recording(jax_private.describe("dx.function", fn, ()))
    inputs = _Inputs(recording, call)
    results, writes = Results(), ProgramWrites()
    with recording.enter():
        args, kwargs = inputs.add_arguments(fn)
        frame = frames.FunctionFrame(recording, may_create, inputs.pull, call.captured)
        inputs.frame = frame
        try:
            with trace_errors.explain(), frames.enter(frame):
                result = fn(*args, **kwargs)
        finally:
            # Custom derivatives in the program keep the frame, which must not keep iterators.
            frame.end()
        if frame.is_incomplete:
            raise TraceAgain
        arrays = results.take(result, frame)
        new = [
            constrain(frame.values[variable], variable.program_sharding)
            for variable in frame.written
        ]
        outputs, form = jax.tree.flatten((arrays, new, writes.take(frame.deferred.writes)))
        donates = [state for state in frame.lifted if state in frame.written]
        reads = [
            state for state in frame.lifted if state in frame.touched and state not in frame.written
        ]
        lift = Lift(reads, donates, list(frame.written), frame.device)
        own, dynamic = _split(inputs.traced, donated)
        given, read = ([frame.lifted[each] for each in part] for part in (lift.donated, lift.read))
        taken = jax.tree.leaves((given, own, read, dynamic))
        recorded = recording.close(taken, outputs)
    num_donated = len(jax.tree.leaves((given, own)))
    compiled = _compile(fn, recorded, num_donated, form)
    on_mesh = (
        call.has_wrapped
        or frame.mesh is not None
        or any(isinstance(state.program_sharding, NamedSharding) for state in frame.lifted)
    )
    return Program(
        compiled,
        lift,
        results,
        writes,
        donated,
        on_mesh,
        frame.has_created,
        frozenset(frame.identified),
        recorded,
        getattr(fn, "__qualname__", type(fn).__qualname__),
    )


class _Inputs:
    """The inputs of a program that is being traced: arguments, and elements of iterators."""

    def __init__(self, recording: jax_private.Recording, call: Call) -> None:
        self.traced: list[jax.Array] = []
        self.frame: frames.FunctionFrame | None = None
        self._recording = recording
        self._call = call
        self._waiting: deque[tuple[LiftedIterator, Any]] = deque()
        self._used: list[LiftedIterator] = []

    def add_arguments(self, fn: Callable[..., object]) -> Any:
        """Adds the arguments and the elements fetched so far, and returns the arguments."""
        call = self._call
        arguments = self._add(call.tree, call.slots, call.dynamic, call.name_inputs(fn))
        self._waiting.extend((it, self._add_element(element)) for it, element in call.pulled)
        return arguments

    def pull(self, iterator: LiftedIterator) -> Any:
        """Returns the next element of an iterator."""
        assert self.frame is not None
        if self.frame.has_steps and any(iterator is used for used in self._used):
            raise HostOnly("next(iterator) is called for another step", HostMode.LOOP)
        self._used.append(iterator)
        if self._waiting and self._waiting[0][0] is iterator:
            return self._waiting.popleft()[1]
        try:
            element = self._call.fetch(iterator)
        except StopIteration:
            if not self._call.pulled:
                raise
            # What the code does with the elements before is done before it gets to the end.
            raise HostOnly("the input ends in the function", HostMode.ONCE) from None
        return self._add_element(element)

    def _add_element(self, element: object) -> Any:
        leaves, tree = jax.tree.flatten(element)
        try:
            _, slots, values = signature.read(leaves, frozenset())
        except signature.Uneven:
            raise HostOnly("an element's pieces differ in shape", HostMode.ONCE) from None
        if jax_private.has_mesh() and any(isinstance(slot, Form) for slot in slots):
            raise NeedsOwnMesh
        names = (f"next(iterator) (part {place})" for place in range(len(values)))
        return self._add(tree, slots, values, names)

    def _add(
        self,
        tree: PyTreeDef,
        slots: Sequence[signature.Slot],
        values: Sequence[Any],
        names: Iterator[str],
    ) -> Any:
        traced = [
            self._recording.add_input(
                jax_private.get_array_type(value), name, functools.partial(_return, value)
            )
            for value, name in zip(values, names, strict=True)
        ]
        self.traced.extend(traced)
        return rebuild(tree, slots, traced)


def _return(value: ArrayLike) -> ArrayLike:
    return value


def _split(values: list[Any], chosen: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """Returns the values at some places, and the others."""
    if not chosen:
        return [], values
    own = [value for place, value in enumerate(values) if place in chosen]
    return own, [value for place, value in enumerate(values) if place not in chosen]


def _compile(
    fn: Callable[..., object], recorded: jax_private.Recorded, num_donated: int, form: PyTreeDef
) -> jax.stages.Wrapped | LookupCall:
    """Returns the program as a function of `(given, own, read, dynamic)`: `Program.call`."""
    cut = jaxprs.Cut(recorded)
    if cut.tables:
        return LookupCall(cut, num_donated, form)

    def replay(given: list[Any], own: list[Any], read: list[Any], dynamic: list[Any]) -> Any:
        inputs = jax.tree.leaves((given, own, read, dynamic))
        if not jax_private.fits(recorded, inputs):
            raise Stale
        # Constants are arrays too, also where `jax.disable_jit` runs the program step by step.
        outputs = [
            each if isinstance(each, jax.Array) else jnp.asarray(each)
            for each in jax_private.run_recorded(recorded, inputs, replay.__name__)
        ]
        return jax.tree.unflatten(form, outputs)

    replay.__name__ = getattr(fn, "__name__", replay.__name__)
    return jax.jit(replay, donate_argnums=(0, 1))

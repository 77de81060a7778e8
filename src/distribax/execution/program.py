"""One compiled specialisation of a function: its inputs, its outputs, and how it is called."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from distribax import contracts, jax_private
from distribax.errors import ControlFlow
from distribax.execution import frames, signature, trace_errors
from distribax.execution.remote_writes import Effects
from distribax.execution.results import Results, constrain
from distribax.execution.row_lookups import StagedCall
from distribax.topology import launch_lock
from distribax.values import is_none_or_opaque

Fetch: TypeAlias = Callable[[], list[Any]]
"""Fetches values that live in another process."""


class Relift(ControlFlow):
    """Ends a trace that met variables which are not inputs yet."""

    def __init__(self, frame: frames.FunctionFrame) -> None:
        super().__init__()
        self.frame = frame


@dataclass(frozen=True)
class Lift:
    """Which variables a program takes as inputs, which of them it replaces, and where it runs.

    A guess is what another signature has needed; too much of it is as wrong as too little, as the
    other signature may use other devices.
    """

    read: tuple[contracts.State, ...] = ()
    written: tuple[contracts.State, ...] = ()
    device: jax.Device | None = None
    is_guess: bool = False
    # Whether it looks up rows of tables in other processes.
    has_stages: bool = False
    # Whether it runs replicas, where the user has set another mesh.
    has_replicas: bool = False

    def extend(self, frame: frames.FunctionFrame) -> Lift:
        """Returns the inputs that a trace turned out to need as well."""
        known = Lift() if self.is_guess else self
        written = dict.fromkeys((*known.written, *frame.written))
        touched = dict.fromkeys((*known.written, *known.read, *frame.touched))
        read = tuple(variable for variable in touched if variable not in written)
        return Lift(
            read,
            tuple(written),
            frame.device,
            has_stages=frame.has_stages,
            has_replicas=self.has_replicas,
        )

    def covers(self, frame: frames.FunctionFrame) -> bool:
        """Tells whether a trace has used nothing that is not an input."""
        if self.is_guess and not (
            frame.touched.keys() == frame.lifted.keys()
            and frame.written.keys() == set(self.written)
        ):
            return False
        return (
            frame.touched.keys() <= frame.lifted.keys()
            and frame.written.keys() <= set(self.written)
            and frame.device is self.device
        )


@dataclass(frozen=True)
class Form:
    """How a flat list of arrays becomes the arguments, and the elements that `next` returns."""

    tree: PyTreeDef
    slots: list[signature.Slot]
    elements: list[tuple[PyTreeDef, list[signature.Slot]]]

    @property
    def has_wrapped(self) -> bool:
        """Whether there are distributed values among them."""
        slots = itertools.chain(self.slots, *(slots for _, slots in self.elements))
        return any(isinstance(slot, signature.WrappedSlot) for slot in slots)

    def rebuild(self, values: Iterable[Any]) -> tuple[Any, list[Any]]:
        """Returns the arguments and the elements with `values` in them."""
        remaining = iter(values)
        arguments = jax.tree.unflatten(self.tree, _fill(self.slots, remaining))
        return arguments, [
            jax.tree.unflatten(tree, _fill(slots, remaining)) for tree, slots in self.elements
        ]


def _fill(slots: list[signature.Slot], values: Iterator[Any]) -> list[Any]:
    return [slot.rebuild(next(values) if slot.is_dynamic else None) for slot in slots]


@dataclass(frozen=True)
class Program:
    """A compiled function with what it reads and writes."""

    call: Callable[..., Any]
    lift: Lift
    results: Results
    effects: Effects
    # Of the variables that are read, those that live in other processes, with what fetches them;
    # and the others.
    fetches: list[tuple[Fetch, list[int]]]
    near: list[int]
    donated: frozenset[int] = frozenset()
    # Whether it is for the mesh of replicas, whatever mesh the user has set.
    on_mesh: bool = False

    def __call__(self, dynamic: list[Any]) -> Any:
        if self.on_mesh and jax_private.has_mesh():
            with jax_private.leave_mesh():
                return self._call(dynamic)
        return self._call(dynamic)

    def _call(self, dynamic: list[Any]) -> Any:
        lift = self.lift
        given = [variable.take_program_value() for variable in lift.written]
        read = self._read()
        own: list[Any] = []
        if self.donated:
            own = [value for index, value in enumerate(dynamic) if index in self.donated]
            dynamic = [value for index, value in enumerate(dynamic) if index not in self.donated]
        with launch_lock:
            if lift.device is None:
                arrays, new, done = self.call(given, own, read, dynamic)
            else:
                with jax.default_device(lift.device):
                    arrays, new, done = self.call(given, own, read, dynamic)
        for variable, value in zip(lift.written, new, strict=True):
            variable.store_program_value(value)
        self.effects.commit(done)
        return self.results.rebuild(arrays)

    def _read(self) -> list[Any]:
        """Returns the values that the program reads; those of one source are fetched together."""
        read = self.lift.read
        if not self.fetches:
            return [variable.program_value() for variable in read]
        values: list[Any] = [None] * len(read)
        for fetch, places in self.fetches:
            for place, value in zip(places, fetch(), strict=True):
                values[place] = value
        for place in self.near:
            values[place] = read[place].program_value()
        return values


def build(
    fn: Callable[..., object],
    form: Form,
    iterators: Sequence[object],
    lift: Lift,
    *,
    may_create: bool,
    donated: frozenset[int] = frozenset(),
) -> Program:
    """Returns a program that is traced, and compiled, when it is first called."""
    results, effects = Results(), Effects()

    def list_names() -> list[str]:
        leaves: tuple[Any, Any] = jax.tree.unflatten(form.tree, [None] * len(form.slots))
        names = trace_errors.name_leaves(fn, leaves, is_none_or_opaque)
        paired = zip(names, form.slots, strict=False)
        return [name for name, slot in paired if slot.is_dynamic]

    def pure(given: list[Any], own: list[Any], read: list[Any], dynamic: list[Any]) -> Any:
        with _release_launch_lock():
            if donated:
                kept, gone = iter(dynamic), iter(own)
                count = len(dynamic) + len(own)
                dynamic = [next(gone if index in donated else kept) for index in range(count)]
            lifted = dict(zip((*lift.written, *lift.read), (*given, *read), strict=True))
            frame = frames.FunctionFrame(lifted, may_create, lift.device, lift.has_stages)
            (args, kwargs), elements = form.rebuild(dynamic)
            frame.pulled = list(zip(iterators, elements, strict=True))
            with trace_errors.explain(fn, "dynamic", list_names), frames.enter(frame):
                result = fn(*args, **kwargs)
        if not lift.covers(frame):
            raise Relift(frame)
        arrays = results.take(result, frame)
        new = [
            constrain(frame.values[variable], variable.program_sharding)
            for variable in lift.written
        ]
        return arrays, new, effects.take(frame.deferred.effects)

    sources: dict[contracts.Source, list[int]] = {}
    near: list[int] = []
    for place, variable in enumerate(lift.read):
        places = near if variable.source is None else sources.setdefault(variable.source, [])
        places.append(place)
    fetches: list[tuple[Fetch, list[int]]] = [
        (functools.partial(source.pull, [lift.read[place] for place in places]), places)
        for source, places in sources.items()
    ]
    call: Callable[..., Any]
    if lift.has_stages:
        call = StagedCall(pure, _release_launch_lock)
    else:
        call = jax.jit(pure, donate_argnums=(0, 1))
    on_mesh = (
        lift.has_replicas
        or form.has_wrapped
        or any(
            isinstance(state.program_sharding, NamedSharding)
            for state in (*lift.written, *lift.read)
        )
    )
    return Program(call, lift, results, effects, fetches, near, donated, on_mesh)


@contextlib.contextmanager
def _release_launch_lock() -> Iterator[None]:
    """Lets other threads start programs while user code is traced."""
    launch_lock.release()
    try:
        yield
    finally:
        launch_lock.acquire()

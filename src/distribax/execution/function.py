"""`dx.function`: compiles ordinary code that reads and writes variables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax

from distribax import context
from distribax.errors import ControlFlow, HostOnly
from distribax.execution import frames, lifting, outputs, signature
from distribax.types import Args, Kwargs, StepFn

_MAX_RETRACES = 64
_MAX_HOST_RUNS = 64


class _Relift(ControlFlow):
    """Ends a trace that met variables which are not inputs yet."""

    def __init__(self, frame: frames.FunctionFrame) -> None:
        super().__init__()
        self.frame = frame


@dataclass
class _Lift:
    """Which variables a program takes as inputs, which of them it replaces, and where it runs."""

    read: tuple[Any, ...] = ()
    written: tuple[Any, ...] = ()
    device: Any = None


@dataclass
class _Program:
    """One compiled specialisation."""

    call: Callable[..., Any]
    lift: _Lift
    results: outputs.Results

    def __call__(self, dynamic: list[Any]) -> Any:
        lift = self.lift
        given = [variable.take_program_value() for variable in lift.written]
        read = [variable.program_value() for variable in lift.read]
        if lift.device is None:
            arrays, new = self.call(given, read, dynamic)
        else:
            with jax.default_device(lift.device):
                arrays, new = self.call(given, read, dynamic)
        for variable, value in zip(lift.written, new, strict=True):
            variable.store_program_value(value)
        return self.results.rebuild(arrays)


class Function:
    """A function that is traced once for each signature and then runs compiled.

    Made by `dx.function`. `python_function` is the function as written, `trace_count` says how
    often it has been compiled.
    """

    def __init__(
        self,
        fn: StepFn,
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, fn)
        self._python = fn
        self._static_argnums = tuple(static_argnums)
        self._static_argnames = tuple(static_argnames)
        self._programs: dict[Any, _Program | str] = {}
        self._pulls: dict[Any, list[tuple[int, Any]]] = {}
        self._lift = _Lift()
        self._called = False
        self._trace_count = 0
        self._runs: dict[Any, Function] = {}

    @property
    def python_function(self) -> StepFn:
        """The function as it was written."""
        return self._python

    @property
    def trace_count(self) -> int:
        """How many signatures have been compiled; a growing number means retracing."""
        return self._trace_count + sum(run.trace_count for run in self._runs.values())

    def experimental_get_tracing_count(self) -> int:
        """Returns `trace_count`, under TensorFlow's name."""
        return self.trace_count

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # One compiled function for each object, kept by the object, so that both end together.
        name = f"_distribax_function_{id(self)}"
        held = getattr(instance, "__dict__", None)
        bound = held.get(name) if held is not None else None
        if bound is None:
            bound = Function(
                self._python.__get__(instance, owner), self._static_argnums, self._static_argnames
            )
            if held is not None:
                held[name] = bound
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = context.current()
        if (
            frames.current() is not None
            or here.copy_id is not None
            or not (here.replica_context is None or here.replica_context.compiles)
        ):
            return self._python(*args, **kwargs)
        return self._call(here, args, kwargs)

    def run_on(self, strategy: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs the function in every replica of `strategy` as one compiled program."""
        return self._run_of(strategy, self._python, strategy)(*args, **kwargs)

    def _run_of(self, strategy: Any, fn: StepFn, key: Any) -> Function:
        run = self._runs.get(key)
        if run is None:

            def call(*args: Any, **kwargs: Any) -> Any:
                return strategy.run(fn, args=args, kwargs=kwargs)

            if len(self._runs) >= _MAX_HOST_RUNS:
                self._runs.pop(next(iter(self._runs)))
            run = self._runs[key] = Function(call)
        return run

    # One call.

    def _call(self, here: context.Entry, args: Args, kwargs: Kwargs) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_none)
        static = self._static_leaves(args, kwargs)
        try:
            keys, slots, dynamic = signature.read(leaves, static)
        except signature.Uneven:
            return self._eager(args, kwargs, [])
        if any(_is_tracer_leaf(value) for value in dynamic):
            return self._python(*args, **kwargs)
        key = (here.strategy, here.replica_context is None, tree, *keys)
        pulled = [self._pull(source, leaves) for source in self._pulls.get(key, ())]
        program_key, inputs = key, dynamic
        element_slots: list[Any] = []
        if pulled:
            try:
                program_key, inputs, element_slots = _with_elements(key, dynamic, pulled)
            except signature.Uneven:
                return self._eager(args, kwargs, pulled)
        program = self._programs.get(program_key)
        if isinstance(program, _Program):
            return program(inputs)
        if program == "loop":
            return self._host(args, kwargs, pulled)
        if program == "eager":
            return self._eager(args, kwargs, pulled)
        return self._first_call(key, args, kwargs, leaves, tree, slots, dynamic, pulled)

    def _first_call(
        self,
        key: Any,
        args: Args,
        kwargs: Kwargs,
        leaves: list[Any],
        tree: Any,
        slots: list[signature.Slot],
        dynamic: list[Any],
        pulled: list[tuple[Any, Any]],
    ) -> Any:
        may_create = not self._called
        lift = self._lift
        for _ in range(_MAX_RETRACES):
            program_key, inputs, element_slots = key, dynamic, []
            if pulled:
                try:
                    program_key, inputs, element_slots = _with_elements(key, dynamic, pulled)
                except signature.Uneven:
                    return self._eager(args, kwargs, pulled)
            program = self._build(tree, slots, element_slots, pulled, lift, may_create)
            try:
                result = program(inputs)
            except _Relift as signal:
                lift = _extended(lift, signal.frame)
            except lifting.NeedElement as signal:
                pulled = [*pulled, (signal.iterator, signal.iterator.fetch())]
                self._pulls[key] = [_source(iterator, leaves) for iterator, _ in pulled]
                continue
            except HostOnly as signal:
                if signal.mode != "create":
                    self._programs[program_key] = signal.mode
                run = self._host if signal.mode == "loop" else self._eager
                return run(args, kwargs, pulled)
            else:
                self._programs[program_key] = program
                self._lift = lift
                self._called = True
                self._trace_count += 1
                return result
            may_create = False
        raise RuntimeError(
            f"dx.function: {self._name} uses other variables each time it is traced, so it cannot "
            "be compiled. Create variables once, outside the function or guarded by "
            "`if self.v is None:`."
        )

    def _build(
        self,
        tree: Any,
        slots: list[signature.Slot],
        element_slots: list[Any],
        pulled: list[tuple[Any, Any]],
        lift: _Lift,
        may_create: bool,
    ) -> _Program:
        results = outputs.Results()
        num_args = sum(slot.kind in ("array", "wrapped") for slot in slots)

        def pure(given: list[Any], read: list[Any], dynamic: list[Any]) -> Any:
            lifted = dict(zip((*lift.written, *lift.read), (*given, *read), strict=True))
            frame = frames.FunctionFrame(lifted, may_create)
            frame.device = lift.device
            values = iter(dynamic[:num_args])
            seen = [
                slot.rebuild(next(values) if slot.kind in ("array", "wrapped") else None)
                for slot in slots
            ]
            frame.pulled = _elements(element_slots, pulled, dynamic[num_args:])
            args, kwargs = jax.tree.unflatten(tree, seen)
            with frames.enter(frame):
                result = self._python(*args, **kwargs)
            if (
                not frame.touched.keys() <= lifted.keys()
                or not frame.written.keys() <= set(lift.written)
                or frame.device is not lift.device
            ):
                raise _Relift(frame)
            arrays = results.take(result, frame)
            new = [
                outputs.constrained(frame.values[variable], variable.sharding)
                for variable in lift.written
            ]
            return arrays, new

        return _Program(jax.jit(pure, donate_argnums=(0,)), lift, results)

    # Calls that the host makes.

    def _eager(self, args: Args, kwargs: Kwargs, pulled: list[tuple[Any, Any]]) -> Any:
        with lifting.replaying(pulled):
            result = self._python(*args, **kwargs)
        self._called = True
        return result

    def _host(self, args: Args, kwargs: Kwargs, pulled: list[tuple[Any, Any]]) -> Any:
        def compiled_run(strategy: Any, fn: StepFn, args: Args, kwargs: Kwargs) -> Any:
            key = (strategy, signature.closure_key(fn))
            return self._run_of(strategy, fn, key)(*args, **kwargs)

        with lifting.compiling_runs(compiled_run):
            return self._eager(args, kwargs, pulled)

    # Small things.

    @property
    def _name(self) -> str:
        return getattr(self._python, "__qualname__", repr(self._python))

    def _pull(self, source: tuple[int, Any], leaves: list[Any]) -> tuple[Any, Any]:
        index, held = source
        iterator = leaves[index] if index >= 0 else held
        return iterator, iterator.fetch()

    def _static_leaves(self, args: Args, kwargs: Kwargs) -> frozenset[int]:
        if not self._static_argnums and not self._static_argnames:
            return frozenset()
        names = set(self._static_argnames)
        positions = {index % len(args) for index in self._static_argnums if index < len(args)}
        parameters = list(inspect.signature(self._python).parameters)
        positions |= {i for i, name in enumerate(parameters[: len(args)]) if name in names}
        marks = jax.tree.map(lambda _: False, (args, kwargs), is_leaf=_is_none)
        marked = (
            tuple(
                jax.tree.map(lambda _: True, mark, is_leaf=_is_none) if i in positions else mark
                for i, mark in enumerate(marks[0])
            ),
            {
                name: jax.tree.map(lambda _: True, mark) if name in names else mark
                for name, mark in marks[1].items()
            },
        )
        return frozenset(i for i, mark in enumerate(jax.tree.leaves(marked)) if mark)

    def __repr__(self) -> str:
        return f"<dx.function {self._name}, {self.trace_count} compiled>"


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_tracer_leaf(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _extended(lift: _Lift, frame: frames.FunctionFrame) -> _Lift:
    written = dict.fromkeys((*lift.written, *frame.written))
    touched = dict.fromkeys((*lift.written, *lift.read, *frame.touched))
    read = tuple(variable for variable in touched if variable not in written)
    return _Lift(read, tuple(written), frame.device)


def _source(iterator: Any, leaves: list[Any]) -> tuple[int, Any]:
    for index, leaf in enumerate(leaves):
        if leaf is iterator:
            return index, None
    return -1, iterator


def _with_elements(
    key: Any, dynamic: list[Any], pulled: list[tuple[Any, Any]]
) -> tuple[Any, list[Any], list[Any]]:
    """Adds fetched elements to the inputs and to the key."""
    inputs, keys, forms = list(dynamic), [], []
    for _, element in pulled:
        leaves, tree = jax.tree.flatten(element)
        parts, slots, values = signature.read(leaves, frozenset())
        inputs.extend(values)
        keys.append((tree, *parts))
        forms.append((tree, slots, len(values)))
    return (key, *keys), inputs, forms


def _elements(
    forms: list[Any], pulled: list[tuple[Any, Any]], values: list[Any]
) -> list[tuple[Any, Any]]:
    """Returns the fetched elements as the traced function sees them."""
    found, start = [], 0
    for (tree, slots, count), (iterator, _) in zip(forms, pulled, strict=True):
        part = iter(values[start : start + count])
        start += count
        leaves = [
            slot.rebuild(next(part) if slot.kind in ("array", "wrapped") else None)
            for slot in slots
        ]
        found.append((iterator, jax.tree.unflatten(tree, leaves)))
    return found


@overload
def function(fn: StepFn, /) -> Function: ...
@overload
def function(
    fn: None = None,
    *,
    static_argnums: Sequence[int] = ...,
    static_argnames: Sequence[str] = ...,
) -> Callable[[StepFn], Function]: ...
def function(
    fn: StepFn | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Compiles a function that may read and write variables and call `strategy.run`.

    Arrays, distributed values and Python numbers are inputs; bools, strings and other objects are
    part of the signature, as are arguments named static.

    Example:
        >>> import distribax as dx
        >>> count = dx.Variable(0)
        >>> @dx.function
        ... def step(x):
        ...     count.assign_add(1)
        ...     return x * 2
        >>> float(step(3.0)), int(count)
        (6.0, 1)
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if fn is None:
        return lambda inner: function_of(inner, numbers, names)
    return function_of(fn, numbers, names)


def function_of(fn: Any, static_argnums: tuple[int, ...], static_argnames: tuple[str, ...]) -> Any:
    """Makes the compiled function, once the decorator's arguments are known."""
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise TypeError(
            f"dx.function: fn={fn!r} is not callable. Use it as @dx.function above a `def`, or as "
            "dx.function(fn)."
        )
    return Function(fn, static_argnums, static_argnames)

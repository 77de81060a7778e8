"""`dx.function`: compiles ordinary code that reads and writes variables."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from typing_extensions import override

from distribax import context, contracts, jax_private, progress
from distribax.errors import HostMode, HostOnly, NeedsOwnMesh
from distribax.execution.calls import signature
from distribax.execution.calls.call import Args, Call, Kwargs
from distribax.execution.calls.input_signature import fit, is_spec, make_example
from distribax.execution.functions.concrete_function import ConcreteFunction
from distribax.execution.programs.guarded_programs import GuardedPrograms, KnownCalls
from distribax.execution.programs.program import Program, Stale, TraceAgain, build
from distribax.execution.programs.siblings import Siblings
from distribax.execution.state import adapters, named_objects
from distribax.execution.state.reachable_variables import CompiledFunction
from distribax.execution.traces import frames, iterators
from distribax.execution.traces.iterators import Pulled
from distribax.topology import Renew, follow
from distribax.values import is_none_or_opaque, nests

_logger = logging.getLogger(__name__)

_MAX_HOST_RUNS = 64
_MAX_TRACES = 8


@dataclass(frozen=True)
class Settings:
    """How a function is compiled.

    Attributes:
        static_argnums: The positions of arguments that are part of the signature.
        static_argnames: The names of such arguments.
        donate_argnums: The positions of arguments whose memory is used for the results.
        input_signature: What the arguments must be like, if that was said.
    """

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    input_signature: tuple[Any, ...] | None = None


class Function(CompiledFunction):
    """A function that is traced once for each signature and then runs compiled.

    `dx.function` makes it.

    Args:
        fn: The function.
        settings: How it is compiled.
    """

    def __init__(self, fn: Callable[..., Any], settings: Settings | None = None) -> None:
        functools.update_wrapper(self, fn)
        self._python = fn
        self._settings = settings or Settings()
        self._known: dict[Hashable, KnownCalls] = {}
        self._siblings = Siblings()
        self._called = False
        self._trace_count = 0
        self._runs: dict[Hashable, Function] = {}
        # Its name in other processes, once it has been sent to one.
        self._uid: str | None = None
        follow(self)

    def renew_devices(self, renew: Renew) -> None:
        """Forgets what was compiled, because JAX has been started again with more devices.

        Args:
            renew: Returns the device that replaces another.
        """
        self._known.clear()
        self._runs.clear()
        self._siblings = Siblings()

    @property
    @override
    def python_function(self) -> Callable[..., Any]:
        """The function as it was written."""
        return self._python

    @property
    def trace_count(self) -> int:
        """How many signatures have been compiled; a growing number means retracing."""
        return self._trace_count + sum(run.trace_count for run in self._runs.values())

    def experimental_get_tracing_count(self) -> int:
        """Returns `trace_count`, under TensorFlow's name.

        Returns:
            How many signatures have been compiled.
        """
        return self.trace_count

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        if instance is None:
            return self
        # One compiled function for each object, kept by the object, so that both end together.
        name = f"_distribax_function_{id(self)}"
        held = getattr(instance, "__dict__", None)
        bound = held.get(name) if held is not None else None
        # The copy of an object has the function of the original, a class that of its base.
        if bound is None or getattr(bound.python_function, "__self__", None) is not instance:
            bound = Function(self._python.__get__(instance, owner), self._settings)
            if isinstance(instance, type):
                setattr(instance, name, bound)
            elif held is not None:
                held[name] = bound
        return bound

    def __deepcopy__(self, memo: dict[int, object]) -> Function:
        return self

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        if self._uid is None:
            self._uid = named_objects.make_uid()
            named_objects.register(self._uid, self)
        return _receive, (self._uid, self._python, self._settings)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Returns the program for some arguments, without running it.

        Args:
            *args: Arguments, or specs (`dx.data.TensorSpec`) with all sizes. None are needed if
                the function has an `input_signature` with all sizes.
            **kwargs: Keyword arguments, likewise.

        Returns:
            An object that can be called, lowered, and asked for its text and cost.

        Raises:
            ValueError: A spec does not tell all sizes, or the function is not one program.
        """
        adapters.load_adapters()
        given = self._settings.input_signature if not args and not kwargs else args
        described = (tuple(given or ()), dict(kwargs))
        args, kwargs = jax.tree.map(
            lambda leaf: make_example(self._name, leaf) if is_spec(leaf) else leaf,
            described,
            is_leaf=lambda leaf: is_spec(leaf) or is_none_or_opaque(leaf),
        )
        call = self._make_call(context.current(), args, kwargs)
        known = self._get_known(call)
        program = self._find(known, call)[1] or self._prepare(known, call)[0]
        if call.pulled:
            # Fetched for the trace; the next call is the one that uses them.
            known.fetched = call.pulled
        if not isinstance(program, Program):
            raise ValueError(
                f"get_concrete_function: {self._name} is not one program: it loops over input, or "
                "its replicas cannot run as one. Take the step inside of it."
            )
        return ConcreteFunction(self, program, call.read_inputs()[1], self._name, described)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapters.load_adapters()
        # What the compiled step writes changes.
        jax_private.forget_closures()
        if self._settings.input_signature is not None:
            args = fit(self._python, self._settings.input_signature, args, kwargs)
            kwargs = {}
        here = context.current()
        frame = frames.current()
        if frame is not None:
            frame.function.has_steps = True
        # What JAX traces is part of its program; compiled apart it would keep values of the trace.
        if frame is not None or here.copy_id is not None or jax_private.is_tracing():
            return self._python(*args, **kwargs)
        replica = here.replica_context
        if replica is None or replica.compiles:
            return self._call(here, args, kwargs)
        # The program reads what the replicas have written so far.
        adapters.commit()
        return replica.runner.call_together(self._run_together, args, kwargs, self._python)

    def _run_together(self, strategy: contracts.Strategy, *args: Any, **kwargs: Any) -> Any:
        """Runs the function for eager replicas that have all called it."""
        return self.run_on(strategy, args, kwargs)

    def run_on(
        self,
        strategy: contracts.Strategy,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Runs the function in every replica of `strategy` as one compiled program.

        Args:
            strategy: The strategy whose replicas run it.
            args: The positional arguments; distributed values give each replica its part.
            kwargs: The keyword arguments.

        Returns:
            The merged results of the replicas.
        """
        return self._get_run(strategy, self._python, strategy)(*args, **kwargs)

    def _get_run(
        self, strategy: contracts.Strategy, fn: Callable[..., Any], key: Hashable
    ) -> Function:
        run = self._runs.get(key)
        if run is None:

            def call(*args: Any, **kwargs: Any) -> Any:
                return strategy.run(fn, args=args, kwargs=kwargs)

            if len(self._runs) >= _MAX_HOST_RUNS:
                self._runs.pop(next(iter(self._runs)))
            run = self._runs[key] = _ReplicaRun(
                call, Settings(donate_argnums=self._settings.donate_argnums)
            )
        return run

    # One call.

    def _call(self, here: context.Entry, args: Args, kwargs: Kwargs) -> Any:
        try:
            call = self._make_call(here, args, kwargs)
        except signature.Traced:
            return self._python(*args, **kwargs)
        except signature.Uneven:
            return self._run_eagerly(args, kwargs, [])
        known = self._known.get(call.key) or self._get_known(call)
        if known.origins or known.fetched:
            try:
                known.fetch(call)
            except StopIteration:
                if not call.pulled:
                    raise
                # What the code does with the elements before is done before it gets to the end.
                return self._run_host_loop(args, kwargs, call.pulled)
        try:
            programs, program, inputs = self._find(known, call)
        except signature.Uneven:
            return self._run_eagerly(args, kwargs, call.pulled)
        if isinstance(program, Program):
            try:
                return program(inputs)
            except Stale:
                assert programs is not None
                programs.remove(program)
                program = None
        if program is None:
            return self._trace_and_call(known, call)
        return self._call_on_host(program, call)

    def _make_call(self, here: context.Entry, args: Args, kwargs: Kwargs) -> Call:
        leaves, tree = nests.flatten_arguments((args, kwargs))
        settings = self._settings
        static = self._find_leaves(args, kwargs, settings.static_argnums, settings.static_argnames)
        keys, slots, dynamic = signature.read(leaves, static)
        where = (here.strategy, here.replica_context is None, jax_private.get_trace_settings())
        return Call(args, kwargs, leaves, tree, slots, dynamic, (where, tree, *keys))

    def _get_known(self, call: Call) -> KnownCalls:
        """Returns what is known of calls like this one."""
        known = self._known.setdefault(call.key, KnownCalls())
        if known.origins is None:
            known.origins = self._siblings.find_origins(call)
        return known

    def _find(
        self, known: KnownCalls, call: Call
    ) -> tuple[GuardedPrograms | None, Program | HostMode | None, list[Any]]:
        """Returns the programs for a call, the one that fits now, and its inputs."""
        elements, inputs = call.read_inputs()
        programs = known.programs.get(elements)
        if programs is None:
            programs = self._siblings.find(call)
            if programs is None:
                return None, None, inputs
            known.programs[elements] = programs
            known.origins = call.find_origins()
        return programs, programs.find(), inputs

    def _trace_and_call(self, known: KnownCalls, call: Call) -> Any:
        """Traces, compiles and calls."""
        with progress.show(f"compiling {self._name}"):
            program, first = self._prepare(known, call)
            if isinstance(program, Program):
                program, inputs = first or program, call.read_inputs()[1]
                program.compile(inputs)
                return program(inputs)
        return self._call_on_host(program, call)

    def _prepare(self, known: KnownCalls, call: Call) -> tuple[Program | HostMode, Program | None]:
        """Traces for a call, and keeps the program; see `_trace` for what it returns."""
        num_changes = adapters.count_changes()
        with adapters.watch() as guards:
            program, first = self._trace(call)
        if program is not HostMode.ONCE:
            # In a loop the host fetches what it needs, and it does not matter what that is.
            is_loop = program is HostMode.LOOP
            elements = () if is_loop else call.read_inputs()[0]
            programs = known.programs.setdefault(elements, GuardedPrograms())
            programs.add(program, guards, num_changes)
            known.origins = [] if is_loop else call.find_origins()
        if isinstance(program, Program):
            self._siblings.add(call, program, programs, self._python)
            self._called = True
            self._trace_count += 1
            if self._trace_count > 1:
                _logger.info(
                    "%s: traced again for new arguments (trace %d)", self._name, self._trace_count
                )
        return program, first

    def _trace(self, call: Call) -> tuple[Program | HostMode, Program | None]:
        """Returns the program, and the one for this call if that does something else."""
        if not call.has_wrapped:
            with contextlib.suppress(NeedsOwnMesh):
                return self._trace_here(call)
        with jax_private.leave_mesh():
            return self._trace_here(call)

    def _trace_here(self, call: Call) -> tuple[Program | HostMode, Program | None]:
        found = self._find_leaves(call.args, call.kwargs, self._settings.donate_argnums, ())
        trace = functools.partial(
            build, self._python, call, donated=_find_dynamic_positions(call.slots, found)
        )
        first = None
        try:
            with contextlib.suppress(TraceAgain):
                first = trace(may_create=not self._called)
                if not first.has_created:
                    return first, None
            # What the code does where it creates variables, such as writing them, it does once.
            program = self._trace_completely(trace)
        except HostOnly as signal:
            return signal.mode, None
        return program, None if first is None or program.does_same(first) else first

    def _trace_completely(self, trace: Callable[..., Program]) -> Program:
        """Traces until all that the replicas read is among their inputs."""
        for _ in range(_MAX_TRACES):
            with contextlib.suppress(TraceAgain):
                return trace(may_create=False)
        raise RuntimeError(
            f"dx.function: {self._name} reads other distributed values, or other ON_READ "
            f"variables, each time that it is traced ({_MAX_TRACES} times). Do not create values "
            "in the function that its replicas find: pass them with strategy.run(fn, args=(x,))."
        )

    # Calls that the host makes.

    def _call_on_host(self, mode: HostMode, call: Call) -> Any:
        run = self._run_eagerly if mode is HostMode.EAGER else self._run_host_loop
        return run(call.args, call.kwargs, call.pulled)

    def _run_eagerly(
        self,
        args: Args,
        kwargs: Kwargs,
        pulled: Sequence[Pulled],
        compiled_run: Callable[..., Any] | None = None,
    ) -> Any:
        # A run that falls back in a host loop must not be sent to the compiler again.
        with iterators.replay(pulled), iterators.compile_runs(compiled_run):
            result = self._python(*args, **kwargs)
        self._called = True
        return result

    def _run_host_loop(self, args: Args, kwargs: Kwargs, pulled: Sequence[Pulled]) -> Any:
        def compiled_run(
            strategy: contracts.Strategy, fn: Callable[..., Any], args: Args, kwargs: Kwargs
        ) -> Any:
            key = (strategy, signature.make_closure_key(fn))
            return self._get_run(strategy, fn, key)(*args, **kwargs)

        return self._run_eagerly(args, kwargs, pulled, compiled_run)

    # Small things.

    @property
    def _name(self) -> str:
        return getattr(self._python, "__qualname__", repr(self._python))

    def _find_leaves(
        self, args: Args, kwargs: Kwargs, argnums: Sequence[int], argnames: Sequence[str]
    ) -> frozenset[int]:
        """Returns the indices of the leaves of the arguments that are named."""
        if not argnums and not argnames:
            return frozenset()
        described = jax_private.list_parameters(self._python)
        parameters = [each.name for each in described]
        takes_more = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in described)
        missing = [i for i in argnums if i >= len(parameters) > 0]
        if missing and not takes_more:
            raise ValueError(
                f"dx.function: static_argnums or donate_argnums has {missing}, but the arguments "
                f"of {self._name} are {parameters}, numbered from 0. `self` of a method is not "
                "counted."
            )
        positions = {i % len(args) for i in argnums if -len(args) <= i < len(args)}
        positions |= {i for i, name in enumerate(parameters[: len(args)]) if name in argnames}
        named = {*argnames, *(parameters[i] for i in argnums if i < len(parameters))}
        marks = [(arg, index in positions) for index, arg in enumerate(args)]
        marks += [(kwargs[name], name in named) for name in sorted(kwargs)]
        found: list[int] = []
        start = 0
        for argument, is_chosen in marks:
            end = start + len(nests.flatten_arguments(argument)[0])
            found.extend(range(start, end) if is_chosen else ())
            start = end
        return frozenset(found)

    @override
    def __repr__(self) -> str:
        return f"<dx.function {self._name}, {self.trace_count} compiled>"


def run_replicas(
    strategy: contracts.Strategy,
    fn: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    run: Callable[..., Any],
) -> Any:
    """Runs `fn` in all replicas: compiled where the caller or `fn` is, and else by `run`.

    Args:
        strategy: The strategy whose replicas run it.
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        run: How the strategy runs a plain function, given it and its arguments.

    Returns:
        The merged results of the replicas.
    """
    frame = frames.current()
    if frame is not None:
        frame.function.has_steps = True
    elif isinstance(fn, Function):
        return fn.run_on(strategy, args, kwargs)
    elif (compiled_run := iterators.get_host_compiled_run()) is not None:
        return compiled_run(strategy, fn, args, kwargs)
    plain = fn.python_function if isinstance(fn, Function) else fn
    return run(adapters.adapt(plain), args, kwargs)


class _ReplicaRun(Function):
    """One `strategy.run`, compiled by itself; replicas that loop over data run eagerly."""

    @override
    def _run_host_loop(self, args: Args, kwargs: Kwargs, pulled: Sequence[Pulled]) -> Any:
        return self._run_eagerly(args, kwargs, pulled)


def _find_dynamic_positions(slots: list[signature.Slot], leaves: frozenset[int]) -> frozenset[int]:
    """Returns where the given leaves are among the inputs of the program."""
    inputs = [i for i, slot in enumerate(slots) if not isinstance(slot, signature.StaticSlot)]
    return frozenset(position for position, index in enumerate(inputs) if index in leaves)


def _receive(uid: str, fn: Callable[..., Any], settings: Settings) -> Function:
    def make() -> Function:
        function = Function(fn, settings)
        function._uid = uid
        return function

    return named_objects.get_or_create(uid, make)

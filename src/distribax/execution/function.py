"""`dx.function`: compiles ordinary code that reads and writes variables."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, overload

import jax
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.errors import HostMode, HostOnly, NeedsOwnMesh
from distribax.execution import adapters, frames, iterators, named_objects, signature
from distribax.execution.call import Args, Call, Kwargs, Origin
from distribax.execution.iterators import Pulled
from distribax.execution.program import Program, Stale, TraceAgain, build
from distribax.execution.siblings import Siblings
from distribax.execution.variants import Variants
from distribax.values import is_none_or_opaque, nests

_logger = logging.getLogger(__name__)

_MAX_HOST_RUNS = 64


class Function:
    """A function that is traced once for each signature and then runs compiled.

    `dx.function` makes it.

    Args:
        fn: The function.
        static_argnums: The positions of arguments that are part of the signature.
        static_argnames: The names of such arguments.
        donate_argnums: The positions of arguments whose memory is used for the results.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
        donate_argnums: Sequence[int] = (),
    ) -> None:
        functools.update_wrapper(self, fn)
        self._python = fn
        self._static_argnums = tuple(static_argnums)
        self._static_argnames = tuple(static_argnames)
        self._donate_argnums = tuple(donate_argnums)
        self._programs: dict[Hashable, Variants] = {}
        self._pulls: dict[Hashable, list[Origin]] = {}
        self._siblings = Siblings()
        self._called = False
        self._trace_count = 0
        self._runs: dict[Hashable, Function] = {}
        # Its name in other processes, once it has been sent to one.
        self._uid: str | None = None

    @property
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
        # The copy of an object has the function of the original.
        if bound is None or getattr(bound.python_function, "__self__", None) is not instance:
            bound = Function(
                self._python.__get__(instance, owner),
                self._static_argnums,
                self._static_argnames,
                self._donate_argnums,
            )
            if held is not None:
                held[name] = bound
        return bound

    def __deepcopy__(self, memo: dict[int, object]) -> Function:
        return self

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        if self._uid is None:
            self._uid = named_objects.make_uid()
            named_objects.register(self._uid, self)
        settings = (self._static_argnums, self._static_argnames, self._donate_argnums)
        return _receive, (self._uid, self._python, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapters.load_adapters()
        # What the compiled step writes changes.
        jax_private.forget_closures()
        here = context.current()
        frame = frames.current()
        if frame is not None:
            frame.function.has_steps = True
        if frame is not None or here.copy_id is not None:
            return self._python(*args, **kwargs)
        replica = here.replica_context
        if replica is None or replica.compiles:
            return self._call(here, args, kwargs)
        if jax_private.is_tracing():
            return self._python(*args, **kwargs)
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
            run = self._runs[key] = _ReplicaRun(call, donate_argnums=self._donate_argnums)
        return run

    # One call.

    def _call(self, here: context.Entry, args: Args, kwargs: Kwargs) -> Any:
        leaves, tree = nests.flatten((args, kwargs), is_none_or_opaque)
        static = self._find_leaves(args, kwargs, self._static_argnums, self._static_argnames)
        try:
            keys, slots, dynamic = signature.read(leaves, static)
        except signature.Uneven:
            return self._eager(args, kwargs, [])
        if any(map(jax_private.is_tracer, dynamic)):
            return self._python(*args, **kwargs)
        where = (here.strategy, here.replica_context is None, jax_private.get_trace_settings())
        call = Call(args, kwargs, leaves, tree, slots, dynamic, (where, tree, *keys))
        pulls = self._pulls.get(call.key)
        if pulls is None:
            pulls = self._siblings.find_pulls(call) or []
        try:
            call.fetch_all(pulls)
        except StopIteration:
            if not call.pulled:
                raise
            # What the code does with the elements before is done before it gets to the end.
            return self._host(args, kwargs, call.pulled)
        try:
            program_key, inputs = call.read_inputs()
        except signature.Uneven:
            return self._eager(args, kwargs, call.pulled)
        variants = self._programs.get(program_key)
        if variants is None and (variants := self._siblings.find(call)) is not None:
            self._programs[program_key] = variants
            self._pulls[call.key] = call.find_origins()
        program = None if variants is None else variants.find()
        if isinstance(program, Program):
            try:
                return program(inputs)
            except Stale:
                assert variants is not None
                variants.remove(program)
                program = None
        if program is None:
            return self._first_call(call)
        return self._call_on_host(program, call)

    def _first_call(self, call: Call) -> Any:
        """Traces, compiles and calls."""
        num_changes = adapters.count_changes()
        with adapters.watch() as guards:
            program, first = self._trace(call)
        if program is not HostMode.ONCE:
            # In a loop the host fetches what it needs, and it does not matter what that is.
            is_loop = program is HostMode.LOOP
            key = call.key if is_loop else call.read_inputs()[0]
            variants = self._programs.setdefault(key, Variants())
            variants.add(program, guards, num_changes)
            self._pulls[call.key] = [] if is_loop else call.find_origins()
            if isinstance(program, Program):
                self._siblings.add(call, program, variants, self._python)
        if isinstance(program, HostMode):
            return self._call_on_host(program, call)
        self._called = True
        self._trace_count += 1
        if self._trace_count > 1:
            _logger.info(
                "%s: traced again for new arguments (trace %d)", self._name, self._trace_count
            )
        return (first or program)(call.read_inputs()[1])

    def _trace(self, call: Call) -> tuple[Program | HostMode, Program | None]:
        """Returns the program, and the one for this call if that does something else."""
        if not call.has_wrapped:
            with contextlib.suppress(NeedsOwnMesh):
                return self._trace_here(call)
        with jax_private.leave_mesh():
            return self._trace_here(call)

    def _trace_here(self, call: Call) -> tuple[Program | HostMode, Program | None]:
        found = self._find_leaves(call.args, call.kwargs, self._donate_argnums, ())
        trace = functools.partial(
            build, self._python, call, donated=_dynamic_positions(call.slots, found)
        )
        first = None
        try:
            with contextlib.suppress(TraceAgain):
                first = trace(may_create=not self._called)
                if not first.has_created:
                    return first, None
            # What the code does where it creates variables, such as writing them, it does once.
            program = trace(may_create=False)
        except HostOnly as signal:
            return signal.mode, None
        return program, None if first is None or program.does_same(first) else first

    # Calls that the host makes.

    def _call_on_host(self, mode: HostMode, call: Call) -> Any:
        run = self._eager if mode is HostMode.EAGER else self._host
        return run(call.args, call.kwargs, call.pulled)

    def _eager(
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

    def _host(self, args: Args, kwargs: Kwargs, pulled: Sequence[Pulled]) -> Any:
        def compiled_run(
            strategy: contracts.Strategy, fn: Callable[..., Any], args: Args, kwargs: Kwargs
        ) -> Any:
            key = (strategy, signature.closure_key(fn))
            return self._get_run(strategy, fn, key)(*args, **kwargs)

        return self._eager(args, kwargs, pulled, compiled_run)

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
        parameters = list(inspect.signature(self._python).parameters)
        positions = {i % len(args) for i in argnums if -len(args) <= i < len(args)}
        positions |= {i for i, name in enumerate(parameters[: len(args)]) if name in argnames}
        named = {*argnames, *(parameters[i] for i in argnums if i < len(parameters))}
        marked = (
            tuple(_mark(arg, index in positions) for index, arg in enumerate(args)),
            {name: _mark(value, name in named) for name, value in kwargs.items()},
        )
        return frozenset(i for i, mark in enumerate(jax.tree.leaves(marked)) if mark)

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
    def _host(self, args: Args, kwargs: Kwargs, pulled: Sequence[Pulled]) -> Any:
        return self._eager(args, kwargs, pulled)


def _mark(nest: object, value: bool) -> Any:
    return jax.tree.map(lambda _: value, nest, is_leaf=is_none_or_opaque)


def _dynamic_positions(slots: list[signature.Slot], leaves: frozenset[int]) -> frozenset[int]:
    """Returns where the given leaves are among the inputs of the program."""
    inputs = [index for index, slot in enumerate(slots) if slot.is_dynamic]
    return frozenset(position for position, index in enumerate(inputs) if index in leaves)


def _receive(uid: str, fn: Callable[..., Any], settings: tuple[Any, ...]) -> Function:
    def make() -> Function:
        function = Function(fn, *settings)
        function._uid = uid
        return function

    return named_objects.get_or_create(uid, make)


@overload
def function(fn: Callable[..., Any], /) -> Function: ...
@overload
def function(
    fn: None = None,
    *,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] = ...,
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Compiles a function that may read and write variables and call `strategy.run`.

    Arrays, distributed values and Python numbers are inputs; bools, strings and other objects are
    part of the signature, as are arguments named static. Variables are inputs, too: what was
    compiled for one is used for others of the same shape and kind, unless the code can tell them
    apart (by a name, or as it also finds one in a closure).

    Args:
        fn: The function; without it, a decorator is returned.
        static_argnums: The positions of arguments that are part of the signature.
        static_argnames: The names of such arguments.
        donate_argnums: The positions of arguments whose memory is used for the results, as with
            `jax.jit`. Variables are always donated.

    Returns:
        The compiled function, which is called like `fn`.

    Raises:
        TypeError: `fn` is not callable.

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
    numbers = _as_tuple(static_argnums)
    donated = _as_tuple(donate_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if fn is None:
        return lambda inner: _make_function(inner, numbers, names, donated)
    return _make_function(fn, numbers, names, donated)


def _as_tuple(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _make_function(
    fn: object,
    static_argnums: tuple[int, ...],
    static_argnames: tuple[str, ...],
    donate_argnums: tuple[int, ...],
) -> Function:
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise TypeError(
            f"dx.function: fn={fn!r} is not callable. Use it as @dx.function above a `def`, or as "
            "dx.function(fn)."
        )
    return Function(fn, static_argnums, static_argnames, donate_argnums)

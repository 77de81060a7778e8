"""`dx.function`: compiles ordinary code that reads and writes variables."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, overload

import jax
from jax.tree_util import PyTreeDef
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.errors import HostMode, HostOnly, NeedsOwnMesh
from distribax.execution import adapters, frames, iterators, named_objects, row_lookups, signature
from distribax.execution.iterators import LiftedIterator, Pulled
from distribax.execution.program import Form, Lift, Program, Relift, build
from distribax.values import is_none_or_opaque, nests

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_Where: TypeAlias = tuple[contracts.Strategy, bool]
"""The strategy of a call, and whether it is in the cross-replica context."""
_Origin: TypeAlias = int | LiftedIterator
"""Where an iterator comes from: its place among the arguments, or itself."""

_logger = logging.getLogger(__name__)

_MAX_RETRACES = 64
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
        self._programs: dict[Hashable, Program | HostMode] = {}
        self._pulls: dict[Hashable, list[_Origin]] = {}
        # The last known inputs, by strategy and context: a good guess for the next signature.
        self._lifts: dict[_Where, Lift] = {}
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
        if (
            frames.current() is not None
            or here.copy_id is not None
            or not (here.replica_context is None or here.replica_context.compiles)
        ):
            return self._python(*args, **kwargs)
        return self._call(here, args, kwargs)

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
            run = self._runs[key] = Function(call, donate_argnums=self._donate_argnums)
        return run

    # One call.

    def _call(self, here: context.Entry, args: _Args, kwargs: _Kwargs) -> Any:
        where = (here.strategy, here.replica_context is None)
        leaves, tree = nests.flatten((args, kwargs), is_none_or_opaque)
        static = self._find_leaves(args, kwargs, self._static_argnums, self._static_argnames)
        try:
            keys, slots, dynamic = signature.read(leaves, static)
        except signature.Uneven:
            return self._eager(args, kwargs, [])
        if any(map(jax_private.is_tracer, dynamic)):
            return self._python(*args, **kwargs)
        call = _Call(args, kwargs, leaves, tree, slots, dynamic, (*where, tree, *keys))
        call.pulled = [_pull(each, leaves) for each in self._pulls.get(call.key, [])]
        try:
            program_key, inputs, _ = call.add_elements()
        except signature.Uneven:
            return self._eager(args, kwargs, call.pulled)
        program = self._programs.get(program_key)
        if isinstance(program, Program):
            return program(inputs)
        if program is None:
            return self._first_call(call, where)
        return (self._host if program is HostMode.LOOP else self._eager)(args, kwargs, call.pulled)

    def _first_call(self, call: _Call, where: _Where) -> Any:
        """Traces, as often as it takes to know all inputs, compiles and calls."""
        may_create = not self._called
        lift = replace(self._lifts.get(where, Lift()), is_guess=True)
        for _ in range(_MAX_RETRACES):
            try:
                program_key, inputs, elements = call.add_elements()
            except signature.Uneven:
                return self._eager(call.args, call.kwargs, call.pulled)
            form = Form(call.tree, call.slots, elements)
            pulled_from = [iterator for iterator, _ in call.pulled]
            donated = self._find_leaves(call.args, call.kwargs, self._donate_argnums, ())
            program = build(
                self._python,
                form,
                pulled_from,
                lift,
                may_create=may_create,
                donated=_dynamic_positions(call.slots, donated),
            )
            try:
                result = program(inputs)
            except Relift as signal:
                lift = lift.extend(signal.frame)
                may_create = False
            except row_lookups.NeedStages:
                lift = replace(lift, has_stages=True)
            except NeedsOwnMesh:
                lift = replace(lift, has_replicas=True)
            except iterators.NeedElement as signal:
                call.pulled.append((signal.iterator, signal.iterator.fetch()))
                self._pulls[call.key] = [_find_origin(it, call.leaves) for it, _ in call.pulled]
            except HostOnly as signal:
                if signal.mode is not HostMode.CREATE:
                    self._programs[program_key] = signal.mode
                run = self._host if signal.mode is HostMode.LOOP else self._eager
                return run(call.args, call.kwargs, call.pulled)
            else:
                self._programs[program_key] = program
                self._lifts[where] = lift
                self._called = True
                self._trace_count += 1
                if self._trace_count > 1:
                    _logger.info(
                        "%s: traced again for new arguments (trace %d)",
                        self._name,
                        self._trace_count,
                    )
                return result
        raise RuntimeError(
            f"dx.function: {self._name} uses other variables each time it is traced, so it cannot "
            "be compiled. Create variables once, outside the function or guarded by "
            "`if self.v is None:`."
        )

    # Calls that the host makes.

    def _eager(
        self,
        args: _Args,
        kwargs: _Kwargs,
        pulled: Sequence[Pulled],
        compiled_run: Callable[..., Any] | None = None,
    ) -> Any:
        # A run that falls back in a host loop must not be sent to the compiler again.
        with iterators.replay(pulled), iterators.compile_runs(compiled_run):
            result = self._python(*args, **kwargs)
        self._called = True
        return result

    def _host(self, args: _Args, kwargs: _Kwargs, pulled: Sequence[Pulled]) -> Any:
        def compiled_run(
            strategy: contracts.Strategy, fn: Callable[..., Any], args: _Args, kwargs: _Kwargs
        ) -> Any:
            key = (strategy, signature.closure_key(fn))
            return self._get_run(strategy, fn, key)(*args, **kwargs)

        return self._eager(args, kwargs, pulled, compiled_run)

    # Small things.

    @property
    def _name(self) -> str:
        return getattr(self._python, "__qualname__", repr(self._python))

    def _find_leaves(
        self, args: _Args, kwargs: _Kwargs, argnums: Sequence[int], argnames: Sequence[str]
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


def _mark(nest: object, value: bool) -> Any:
    return jax.tree.map(lambda _: value, nest, is_leaf=is_none_or_opaque)


def _dynamic_positions(slots: list[signature.Slot], leaves: frozenset[int]) -> frozenset[int]:
    """Returns where the given leaves are among the inputs of the program."""
    inputs = [index for index, slot in enumerate(slots) if slot.is_dynamic]
    return frozenset(position for position, index in enumerate(inputs) if index in leaves)


@dataclass
class _Call:
    """One call that is being compiled: its arguments and the elements fetched for it."""

    args: _Args
    kwargs: _Kwargs
    leaves: list[Any]
    tree: PyTreeDef
    slots: list[signature.Slot]
    dynamic: list[Any]
    key: Hashable
    pulled: list[Pulled] = field(default_factory=list)

    def add_elements(
        self,
    ) -> tuple[Hashable, list[Any], list[tuple[PyTreeDef, list[signature.Slot]]]]:
        """Returns the key, the inputs and the elements' forms, fetched elements included."""
        if not self.pulled:
            return self.key, self.dynamic, []
        inputs, keys, forms = list(self.dynamic), [], []
        for _, element in self.pulled:
            leaves, tree = jax.tree.flatten(element)
            parts, slots, values = signature.read(leaves, frozenset())
            inputs.extend(values)
            keys.append((tree, *parts))
            forms.append((tree, slots))
        return (self.key, *keys), inputs, forms


def _find_origin(iterator: LiftedIterator, leaves: Sequence[object]) -> _Origin:
    for index, leaf in enumerate(leaves):
        if leaf is iterator:
            return index
    return iterator


def _pull(origin: _Origin, leaves: Sequence[Any]) -> Pulled:
    iterator: LiftedIterator = leaves[origin] if isinstance(origin, int) else origin
    return iterator, iterator.fetch()


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
    part of the signature, as are arguments named static.

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

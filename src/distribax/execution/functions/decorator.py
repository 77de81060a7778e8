"""`dx.function` itself: the decorator, with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

from distribax import jax_private
from distribax.execution.functions.function import Function, Settings


@overload
def function(fn: Callable[..., Any], /) -> Function: ...
@overload
def function(
    fn: None = None,
    input_signature: Sequence[object] | None = ...,
    autograph: bool = ...,
    jit_compile: bool | None = ...,
    reduce_retracing: bool = ...,
    *,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] = ...,
    **experimental: object,
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None,
    input_signature: Sequence[object] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    **experimental: object,
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Compiles a function that may read and write variables and call `strategy.run`.

    Arrays, distributed values and Python numbers are inputs; bools, strings and other objects are
    part of the signature, as are arguments named static. Variables are inputs, too: what was
    compiled for one is used for others of the same shape and kind, unless the code can tell them
    apart (by a name, or as it also finds one in a closure).

    Args:
        fn: The function; without it, a decorator is returned.
        input_signature: A `dx.data.TensorSpec`, or a nest of them, for each argument: the function
            accepts only arguments that fit. JAX still compiles for each size of a dimension that
            is None.
        autograph: Accepted as in TensorFlow; it changes nothing.
        jit_compile: Accepted as in TensorFlow; everything is compiled.
        reduce_retracing: Accepted as in TensorFlow; it changes nothing.
        static_argnums: The positions of arguments that are part of the signature; `self` of a
            method is not counted.
        static_argnames: The names of such arguments.
        donate_argnums: The positions of arguments whose memory is used for the results, as with
            `jax.jit`. Variables are always donated.
        **experimental: TensorFlow's arguments that begin with `experimental_`; they change nothing.

    Returns:
        The compiled function, which is called like `fn`.

    Raises:
        TypeError: `fn` is not callable, a generator or a coroutine, or another argument is not
            known.
        ValueError: `static_argnames` has a name that no argument of `fn` has.

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
    for name in experimental:
        if not name.startswith("experimental_"):
            raise TypeError(f"dx.function() got an unexpected keyword argument {name!r}")
    settings = Settings(
        _as_tuple(static_argnums),
        (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
        _as_tuple(donate_argnums),
        None if input_signature is None else tuple(input_signature),
    )
    return (lambda inner: _make(inner, settings)) if fn is None else _make(fn, settings)


def _as_tuple(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _make(fn: object, settings: Settings) -> Function:
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise TypeError(
            f"dx.function: fn={fn!r} is not callable. Use it as @dx.function above a `def`, or as "
            "dx.function(fn)."
        )
    _check_kind(fn)
    _check_static(fn, settings)
    return Function(fn, settings)


def _check_kind(fn: Callable[..., object]) -> None:
    inner = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        kind, instead = "a generator", "return a list of them"
    elif inspect.iscoroutinefunction(inner):
        kind, instead = "a coroutine", "write `def`, and call it from the coroutine"
    else:
        return
    name = getattr(fn, "__qualname__", repr(fn))
    raise TypeError(
        f"dx.function: {name} is {kind}, whose code runs after the call has returned, so that it "
        f"cannot be compiled. Compile a function that returns its results: {instead}."
    )


def _check_static(fn: Callable[..., object], settings: Settings) -> None:
    """Raises if `static_argnames` names no argument: such a name would have no effect."""
    parameters = jax_private.list_parameters(fn)
    names = [each.name for each in parameters]
    takes_more = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    unknown = [name for name in settings.static_argnames if name not in names]
    if unknown and names and not takes_more:
        raise ValueError(
            f"dx.function: static_argnames has {unknown}, but the arguments of "
            f"{getattr(fn, '__qualname__', repr(fn))} are {names}."
        )

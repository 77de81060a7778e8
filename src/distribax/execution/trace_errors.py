"""Errors of code that wants a value while it is traced, in the words of the user's own function.

JAX names the function that it traces and that function's arguments. Both are the engine's: here
they are replaced by the function that the user has written and by its arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, SequenceKey, keystr

_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_TRACED = re.compile(r"the function \w+ at \S+/distribax/execution/\S+\.py:\d+ for \w+")

_ID_HINT = (
    "replica_id_in_sync_group is such a value in a compiled step: all replicas are one program, so "
    "it has no number while the code is traced. "
)
_HINT = (
    "Write jnp.where(condition, a, b) for a choice between values, or "
    "jax.lax.cond(condition, f, g, x) for one between computations, instead of `if`. Outside "
    "dx.function the code runs once per replica, and `if` works."
)


@contextlib.contextmanager
def explain(
    fn: Callable[..., object],
    argument: str,
    list_names: Callable[[], Sequence[str]],
    uses_replica_id: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Rewrites the errors of code that needs a value which is not known while it is traced.

    Args:
        fn: The user's function that is traced.
        argument: What JAX calls the list of its arguments.
        list_names: Returns what the user calls each of them.
        uses_replica_id: Tells whether the code has asked for the index of its replica.

    Yields:
        Nothing.
    """
    try:
        yield
    except _ERRORS as error:
        text = str(error)
        if _HINT not in text:
            by_id = "the argument" not in text and uses_replica_id()
            text = f"{text}\n{_ID_HINT if by_id else ''}{_HINT}"
        text = _TRACED.sub(f"the function {_describe(fn)} for dx.function", text, count=1)
        names = list_names()

        def rename(found: re.Match[str]) -> str:
            index = int(found[1])
            return names[index] if index < len(names) else found[0]

        error.args = (re.sub(rf"\b{argument}\[(\d+)\]", rename, text),)
        raise


def _describe(fn: Callable[..., object]) -> str:
    inner = inspect.unwrap(fn)
    name = getattr(inner, "__qualname__", repr(inner))
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def name_leaves(
    fn: Callable[..., object],
    args_and_kwargs: tuple[Sequence[object], dict[str, object]],
    is_leaf: Callable[[Any], bool],
) -> list[str]:
    """Returns what a user calls each leaf of a function's arguments, such as `batch['x'][0]`."""
    try:
        parameters = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # Built-in functions may not tell.
        parameters = []
    paths, _ = jax.tree_util.tree_flatten_with_path(args_and_kwargs, is_leaf=is_leaf)
    return [_name(path, parameters) for path, _ in paths]


def _name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    match path[1]:
        case SequenceKey(idx=index):
            first = parameters[index] if index < len(parameters) else f"args[{index}]"
        case DictKey(key=key):
            first = str(key)
    return first + keystr(tuple(path[2:]))

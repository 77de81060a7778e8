"""Which variables a function can reach by another way than its arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, cast

import jax
import numpy as np

from distribax import jax_private
from distribax.execution.state.roles import RoleArgument, list_objects

_MOST_OBJECTS: Final = 20_000

_ends: tuple[type, ...] = (
    *(ModuleType, CodeType, str, bytes, int, float, complex, np.ndarray, jax.Array),
)


def end_at(*types: type) -> None:
    """Does not look inside objects of these types: no variable is found through them."""
    global _ends
    _ends = (*_ends, *types)


def find_variables(roots: Iterable[object]) -> frozenset[int] | None:
    """Returns the ids of the variables that code can reach, from functions and other objects.

    None if there is too much to look at.
    """
    found: set[int] = set()
    seen: set[int] = set()
    # Objects are kept, so that their ids stay their own.
    kept: list[object] = []
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        # Not `isinstance`, which may run code of the object.
        if id(thing) in seen or issubclass(type(thing), _ends):
            continue
        if len(kept) == _MOST_OBJECTS:
            return None
        seen.add(id(thing))
        kept.append(thing)
        if issubclass(type(thing), RoleArgument):
            found.update(map(id, list_objects([cast("RoleArgument", thing)])))
        else:
            waiting.extend(_look_inside(thing))
    return frozenset(found)


def _look_inside(thing: Any) -> Iterator[Any]:
    kind = type(thing)
    if kind is FunctionType:
        yield from (thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__)
        if not jax_private.is_library_code(thing.__code__):
            known = thing.__globals__
            yield from (known[name] for name in _list_names(thing.__code__) if name in known)
    elif issubclass(kind, weakref.ref):
        yield thing()
    elif issubclass(kind, type):
        if thing.__module__ != "builtins":
            yield from vars(thing).values()
            yield from thing.__bases__
    else:
        yield kind
        if hasattr(kind, "python_function"):
            # What a compiled function has been traced for is no way for its code.
            yield thing.python_function
        else:
            yield from gc.get_referents(thing)


def _list_names(code: CodeType) -> Iterator[str]:
    """Yields the names that code, and the functions inside it, may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant)

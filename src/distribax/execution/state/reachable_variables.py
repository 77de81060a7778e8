"""Which variables a function can reach by another way than its arguments."""

from __future__ import annotations

import abc
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final, cast

import jax
import numpy as np

from distribax import jax_private
from distribax.execution.state.role_arguments import RoleArgument, list_objects

_MOST_OBJECTS: Final = 20_000

# The builtin functions that tell variables apart.
_IDENTITY: Final = frozenset({"id", "hash"})
_ends: tuple[type, ...] = (
    *(ModuleType, CodeType, str, bytes, int, float, complex, np.ndarray, jax.Array),
)


class CompiledFunction:
    """A function that `dx.function` compiles."""

    @property
    @abc.abstractmethod
    def python_function(self) -> Callable[..., Any]:
        """The function as it was written."""


def end_at(*types: type) -> None:
    """Does not look inside objects of these types: no variable is found through them."""
    global _ends
    _ends = (*_ends, *types)


def find_variables(roots: Iterable[object]) -> frozenset[int] | None:
    """Returns the ids of the variables that code can reach, from functions and other objects.

    None if that cannot be told: there is too much to look at, or the code asks for the `id` of
    something, which may lead anywhere.
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
        if len(kept) == _MOST_OBJECTS or _asks_for_identity(thing):
            return None
        seen.add(id(thing))
        kept.append(thing)
        if issubclass(type(thing), RoleArgument):
            found.update(map(id, list_objects([cast("RoleArgument", thing)])))
        else:
            waiting.extend(_look_inside(thing))
    return frozenset(found)


def list_named(fn: Callable[..., object]) -> list[object]:
    """Returns what a function calls by a name of its own: global names, and those around it."""
    inner = getattr(fn, "__func__", fn)
    if type(inner) is not FunctionType:
        return []
    known = inner.__globals__
    cells = [cell.cell_contents for cell in inner.__closure__ or () if _is_bound(cell)]
    return [*cells, *(known[name] for name in _list_names(inner.__code__) if name in known)]


def _is_bound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _asks_for_identity(thing: Any) -> bool:
    if type(thing) is not FunctionType or jax_private.is_library_code(thing.__code__):
        return False
    return not _IDENTITY.isdisjoint(_list_names(thing.__code__))


def _look_inside(thing: Any) -> Iterator[Any]:
    kind = type(thing)
    if kind is FunctionType:
        yield from (thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__)
        if not jax_private.is_library_code(thing.__code__):
            names = set(_list_names(thing.__code__))
            # Modules that the code imports itself, too.
            imported = [sys.modules[name] for name in names & sys.modules.keys()]
            for each in (*list_named(thing), *imported):
                yield from _look_up(each, names)
    elif issubclass(kind, weakref.ref):
        yield thing()
    elif issubclass(kind, type):
        if thing.__module__ != "builtins":
            yield from vars(thing).values()
            yield from thing.__bases__
    else:
        yield kind
        if issubclass(kind, CompiledFunction):
            # What a compiled function has been traced for is no way for its code.
            yield thing.python_function
        else:
            yield from gc.get_referents(thing)


def _look_up(thing: object, names: set[str]) -> Iterator[object]:
    """Yields what code with these names finds in a module; what is no module as it is."""
    modules: list[object] = [thing]
    seen: set[int] = set()
    while modules:
        each = modules.pop()
        if not isinstance(each, ModuleType):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            inside = vars(each)
            if not _is_library(inside):
                modules.extend(inside[name] for name in names & inside.keys())


def _is_library(module: dict[str, Any]) -> bool:
    where = module.get("__file__")
    return where is not None and jax_private.is_library_file(where)


def _list_names(code: CodeType) -> Iterator[str]:
    """Yields the names that code, and the functions inside it, may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant)

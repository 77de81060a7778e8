"""Pickles functions with what they capture, and arguments with references, for workers."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import numpy as np
from typing_extensions import override

from distribax.coordinator.references import (
    Definition,
    DefinitionKind,
    WorkerReference,
    collect_references,
)

_PACKAGE: Final = __name__.partition(".")[0]
_PROTOCOL: Final = 5

PLAIN_TYPES: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values any process can unpickle."""


def dump_value(value: object) -> tuple[bytes, tuple[WorkerReference, ...]]:
    """Returns a value's pickle and the references inside it."""
    buffer = io.BytesIO()
    with collect_references() as needs:
        _ValuePickler(buffer, _PROTOCOL).dump(value)
    return buffer.getvalue(), tuple(needs)


class _ValuePickler(cloudpickle.Pickler):
    """Pickles values; classes of the program, which workers cannot import, by number.

    Otherwise each value would bring its class along, which takes time and resets the class's
    attributes.
    """

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ in _by_value:
            return _refer_to_class(obj).__reduce__()
        return super().reducer_override(obj)


_classes: weakref.WeakKeyDictionary[type, WorkerReference] = weakref.WeakKeyDictionary()


def _refer_to_class(cls: type) -> WorkerReference:
    reference = _classes.get(cls)
    if reference is None:
        data, needs = dump_code(cls)
        name = f"the class {describe(cls)}"
        reference = WorkerReference(Definition(DefinitionKind.OBJECT, name, lambda _: data, needs))
        _classes[cls] = reference
    return reference


def dump_code(value: object) -> tuple[bytes, tuple[WorkerReference, ...]]:
    """Returns the pickle of a function or a class, its code included, and its references."""
    with collect_references() as needs:
        data = cloudpickle.dumps(value, _PROTOCOL)
    return data, tuple(needs)


def dump_arguments(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[bytes | None, tuple[WorkerReference, ...]]:
    """Returns the pickle of a call's arguments, None if it has none, and their references."""
    if not args and not kwargs:
        return None, ()
    if all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values())):
        return pickle.dumps((tuple(args), dict(kwargs)), _PROTOCOL), ()
    try:
        return dump_value((tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(
            f"schedule: the arguments of {describe(fn)} cannot be sent to a worker: "
            f"{quote(error)}. Pass numbers, arrays, nests of them and objects that can be "
            "pickled; make what cannot be (locks, open files, generators) inside the function."
        ) from error


def _is_plain(value: object) -> bool:
    """Tells whether any process can unpickle a value, and nothing in it is a reference."""
    return type(value) in PLAIN_TYPES or (
        type(value) is np.ndarray and value.dtype.kind in "biufcSU"
    )


def describe(fn: object) -> str:
    """Returns the name of a function as an error message shows it."""
    plain = _unwrap(fn)
    name = getattr(plain, "__qualname__", None)
    return f"{plain.__module__}.{name}" if name else repr(fn)


def quote(error: BaseException) -> str:
    """Returns an exception's message as a part of another one."""
    return str(error).rstrip(".")


class FunctionCatalogue:
    """The functions that have been scheduled; each is pickled once.

    What a function captures is pickled when it is first scheduled: a later change, for example of
    a captured list, does not reach the workers. What changes is passed as an argument.
    """

    def __init__(self) -> None:
        # By the identity of the function, or of the object whose method it is.
        self._known: dict[int, _Scheduled] = {}
        self._by_digest: weakref.WeakValueDictionary[bytes, Definition] = (
            weakref.WeakValueDictionary()
        )

    def define(self, fn: Callable[..., object]) -> Definition:
        """Returns what workers know the function as."""
        owner: object = fn
        method: Callable[..., Any] | None = None
        if isinstance(fn, types.MethodType):
            owner, method = fn.__self__, fn.__func__
        known = self._known.get(id(owner))
        if known is not None and known.owner() is owner and method in known.definitions:
            return known.definitions[method]
        definition = self._pickle(fn)
        self._remember(owner, method, definition)
        return definition

    def _pickle(self, fn: Callable[..., object]) -> Definition:
        data, needs = dump_callable(fn, "schedule", "fn")
        digest = hashlib.blake2b(data, digest_size=16).digest()
        # The same code with other references in it has other numbers in its bytes.
        known = self._by_digest.get(digest)
        if known is None:
            known = Definition(DefinitionKind.OBJECT, describe(fn), lambda _: data, needs)
            self._by_digest[digest] = known
        return known

    def _remember(
        self, owner: object, method: Callable[..., Any] | None, definition: Definition
    ) -> None:
        key = id(owner)
        known = self._known.get(key)
        if known is not None and known.owner() is owner:
            known.definitions[method] = definition
            return
        try:
            alive = weakref.ref(owner, lambda _: self._known.pop(key, None))
        except TypeError:
            return  # Nothing tells when it is gone: it is pickled each time.
        self._known[key] = _Scheduled(alive, {method: definition})


class _Scheduled(NamedTuple):
    """An object that was scheduled: a function (by None), or the owner of scheduled methods."""

    owner: weakref.ref[object]
    definitions: dict[Callable[..., Any] | None, Definition]


def dump_callable(
    fn: Callable[..., object], method: str, argument: str
) -> tuple[bytes, tuple[WorkerReference, ...]]:
    """Returns the pickle of a function with what it captures, and its references.

    Args:
        fn: The function.
        method: The method that it was passed to, for error messages.
        argument: The argument that it was passed as, likewise.

    Raises:
        TypeError: If it cannot be pickled.
    """
    module = pickle_by_value(fn)
    try:
        return dump_code(fn)
    except Exception as error:
        if module is not None:
            # Something that the module holds cannot be pickled; workers may be able to import it.
            cloudpickle.unregister_pickle_by_value(module)
            _by_value.discard(module.__name__)
            _by_name.add(module.__name__)
            return dump_callable(fn, method, argument)
        raise TypeError(
            f"{method}: {argument}={describe(fn)} cannot be sent to a worker: {quote(error)}. A "
            "function takes along the variables that it uses from outside; make those that cannot "
            "be pickled (locks, open files, generators) inside the function."
        ) from error


def pickle_by_value(code: object) -> types.ModuleType | None:
    """Has functions and classes of a module pickled by value, if workers cannot import it.

    Args:
        code: A function or class of the module.

    Returns:
        The module, or None if workers can import it.
    """
    name = getattr(_unwrap(code), "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or name in _by_name:
        return None
    if module.__name__.partition(".")[0] == _PACKAGE or _is_installed(module):
        return None
    # Never undone: a class of the module must be the same in functions and in arguments.
    cloudpickle.register_pickle_by_value(module)
    _by_value.add(module.__name__)
    return module


_by_value: set[str] = {"__main__"}
"""Modules whose functions and classes are pickled by value."""
_by_name: set[str] = set()
"""Modules that cannot be pickled by value: workers have to import them."""


def _unwrap(fn: object) -> object:
    """Returns what has the name of a callable: the function itself, or the callable's class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if hasattr(fn, "__qualname__") else type(fn)


@functools.cache
def _is_installed(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # Built in.
    path = Path(file).resolve()
    # Of a user, of the system, or of another environment that is on the path.
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _list_installation_folders())


@functools.cache
def _list_installation_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in names})

"""Pickles for workers: functions with what they capture, arguments with references."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import sys
import sysconfig
import types
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from distribax.coordinator.references import Definition, Kind, Reference, collecting, resolve
from distribax.types import Args, Kwargs, StepFn

_PACKAGE = __name__.partition(".")[0]
_PROTOCOL = 5
_NUM_KEPT = 64


def dumps(value: Any) -> tuple[bytes, tuple[Reference, ...]]:
    """Pickles a value, and returns the references inside it beside the bytes."""
    buffer = io.BytesIO()
    with collecting() as needs:
        _Pickler(buffer, _PROTOCOL).dump(value)
    return buffer.getvalue(), tuple(needs)


class _Pickler(cloudpickle.Pickler):
    """Pickles values; the program's own classes, which workers cannot import, by number.

    Otherwise each value would bring its class along, which takes time and sets the class back to
    what it was in the beginning.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and _is_shipped(obj):
            return _class_reference(obj).__reduce__()
        return super().reducer_override(obj)


class ClassReference(Reference):
    """A class of the program's own."""

    __slots__ = ("_definition",)

    def __init__(self, kind: type) -> None:
        data, needs = dumps_whole(kind)
        self._definition = Definition(
            Kind.OBJECT, f"the class {described(kind)}", lambda _: data, needs
        )

    @property
    def definition(self) -> Definition:
        return self._definition


_classes: weakref.WeakKeyDictionary[type, ClassReference] = weakref.WeakKeyDictionary()


def _class_reference(kind: type) -> ClassReference:
    reference = _classes.get(kind)
    if reference is None:
        reference = _classes[kind] = ClassReference(kind)
    return reference


def _is_shipped(kind: type) -> bool:
    return kind.__module__ == "__main__" or kind.__module__ in _by_value


def dumps_whole(value: Any) -> tuple[bytes, tuple[Reference, ...]]:
    """Pickles a function or a class with all that it uses, also itself."""
    with collecting() as needs:
        data = cloudpickle.dumps(value, _PROTOCOL)
    return data, tuple(needs)


def dump_arguments(
    fn: StepFn, args: Args, kwargs: Kwargs
) -> tuple[bytes | None, tuple[Reference, ...]]:
    """Pickles the arguments of a call as they are now; None stands for no arguments."""
    if not args and not kwargs:
        return None, ()
    if all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values())):
        return pickle.dumps((tuple(args), dict(kwargs)), _PROTOCOL), ()
    if not kwargs and all(isinstance(arg, Reference) for arg in args):
        return _of_references(tuple([arg.reference_number for arg in args])), tuple(args)
    try:
        return dumps((tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(
            f"schedule: the arguments of {described(fn)} cannot be sent to a worker: "
            f"{reason(error)}. Pass numbers, arrays, nests of them and objects that can be "
            "pickled; make what cannot be (locks, open files, generators) inside the function."
        ) from error


@functools.lru_cache(_NUM_KEPT)
def _of_references(numbers: tuple[int, ...]) -> bytes:
    """Pickles arguments that are references: mostly an iterator, at each step the same."""
    return pickle.dumps((tuple(map(_Number, numbers)), {}), _PROTOCOL)


class _Number:
    """A reference's number, pickled as the reference is."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return resolve, (self._number,)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def _is_plain(value: Any) -> bool:
    """Tells whether anybody can unpickle a value, and nothing in it is a reference."""
    kind = type(value)
    return kind in _PLAIN or (kind is np.ndarray and value.dtype.kind in "biufcSU")


def described(fn: Any) -> str:
    """Returns the name of a function as an error message shows it."""
    plain = _plain(fn)
    name = getattr(plain, "__qualname__", None)
    return f"{plain.__module__}.{name}" if name else repr(fn)


def reason(error: BaseException) -> str:
    """Returns an exception's message as a part of another one."""
    return str(error).rstrip(".")


class FunctionCatalogue:
    """The functions that have been scheduled; each is pickled once.

    What a function captures is taken when it is first scheduled: a later change of a captured
    list, say, does not reach the workers. What changes is passed as an argument.
    """

    def __init__(self) -> None:
        # By the identity of the function, or of the object whose method it is.
        self._known: dict[int, tuple[weakref.ref[Any], dict[Any, Definition]]] = {}
        self._by_digest: weakref.WeakValueDictionary[bytes, Definition] = (
            weakref.WeakValueDictionary()
        )

    def definition(self, fn: StepFn) -> Definition:
        """Returns what workers know the function as."""
        owner: Any
        owner, part = (fn.__self__, fn.__func__) if type(fn) is types.MethodType else (fn, None)
        entry = self._known.get(id(owner))
        if entry is not None and entry[0]() is owner and part in entry[1]:
            return entry[1][part]
        definition = self._pickled(fn)
        self._remember(owner, part, definition)
        return definition

    def _pickled(self, fn: StepFn) -> Definition:
        data, needs = pickle_callable(fn, "schedule", "fn")
        digest = hashlib.blake2b(data, digest_size=16).digest()
        # The same code with other references in it has other numbers in its bytes.
        known = self._by_digest.get(digest)
        if known is None:
            known = Definition(Kind.OBJECT, described(fn), lambda _: data, needs)
            self._by_digest[digest] = known
        return known

    def _remember(self, owner: Any, part: Any, definition: Definition) -> None:
        key = id(owner)
        entry = self._known.get(key)
        if entry is not None and entry[0]() is owner:
            entry[1][part] = definition
            return
        try:
            alive = weakref.ref(owner, lambda _: self._known.pop(key, None))
        except TypeError:
            return  # Nothing tells when it is gone: it is pickled each time.
        self._known[key] = (alive, {part: definition})


def pickle_callable(fn: StepFn, method: str, argument: str) -> tuple[bytes, tuple[Reference, ...]]:
    """Pickles a function with what it captures, or says why that is not possible."""
    module = _module_to_ship(fn)
    if module is not None:
        # For good: a class of that module has to be the same in functions and in arguments.
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(module.__name__)
    try:
        return dumps_whole(fn)
    except Exception as error:
        if module is not None:
            # Something that the module holds cannot be pickled; workers may be able to import it.
            cloudpickle.unregister_pickle_by_value(module)
            _by_value.discard(module.__name__)
            _by_name.add(module.__name__)
            return pickle_callable(fn, method, argument)
        raise TypeError(
            f"{method}: {argument}={described(fn)} cannot be sent to a worker: {reason(error)}. A "
            "function takes along the variables that it uses from outside; make those that cannot "
            "be pickled (locks, open files, generators) inside the function."
        ) from error


_by_value: set[str] = set()
"""Modules whose functions and classes are shipped."""
_by_name: set[str] = set()
"""Modules that could not be shipped: workers have to import them."""


def _plain(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if hasattr(fn, "__qualname__") else type(fn)


def _module_to_ship(fn: Any) -> types.ModuleType | None:
    """Returns the function's module unless workers have it: what is installed they have."""
    name = getattr(_plain(fn), "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or name in _by_name:
        return None
    if module.__name__.partition(".")[0] == _PACKAGE or _is_installed(module):
        return None
    return module


@functools.cache
def _is_installed(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # Built in.
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in _installation_folders())


@functools.cache
def _installation_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in names})

"""What the reference of the public names lacks: Args, Returns and Raises of what users can call."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType

FACES = (
    "distribax",
    "distribax.cluster_resolver",
    "distribax.contrib.distribute",
    "distribax.coordinator",
    "distribax.data",
    "distribax.data.experimental",
    "distribax.estimator",
    "distribax.experimental",
    "distribax.integrations.keras",
    "distribax.logging",
    "distribax.metrics",
    "distribax.partitioners",
    "distribax.random",
    "distribax.testing",
    "distribax.train",
)
"""The modules whose names users may use."""

_SPECIAL = ("__call__",)


@functools.cache
def public_objects() -> dict[str, type | FunctionType]:
    """Returns the classes and functions that users can reach, by the name where they are defined.

    Returns:
        Each object once, however many faces show it; only what distribax itself defines.
    """
    found: dict[str, type | FunctionType] = {}
    for face in FACES:
        module = _face(face)
        for name in dir(module):
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").partition(".")[0] == "distribax"
            if not name.startswith("_") and is_ours and isinstance(value, type | FunctionType):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def _face(name: str) -> ModuleType:
    parent, _, last = name.rpartition(".")
    # A face may be an attribute of the package that is loaded on use.
    found = getattr(importlib.import_module(parent), last, None) if parent else None
    return found if isinstance(found, ModuleType) else importlib.import_module(name)


def find_gaps(name: str, value: type | FunctionType) -> Iterator[str]:
    """Yields what the docstrings of a class and its methods, or of a function, lack."""
    if isinstance(value, FunctionType):
        yield from _gaps_of_function(name, value, inspect.getdoc(value) or "")
        return
    doc = value.__doc__ or ""
    if not doc:
        yield f"{name}: no docstring"
    # Enums and exceptions are not made by users; a dataclass lists its fields.
    constructor = vars(value).get("__init__")
    if isinstance(constructor, FunctionType) and not issubclass(value, BaseException):
        both = f"{doc}\n{constructor.__doc__ or ''}"
        yield from _gaps_of_function(name, constructor, both)
    for attribute, member in vars(value).items():
        if attribute.startswith("_") and attribute not in _SPECIAL:
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if isinstance(member, property) and isinstance(member.fget, FunctionType):
            yield from _gaps_of_property(f"{name}.{attribute}", member.fget, member.__doc__ or "")
        if isinstance(member, FunctionType) and member.__module__.startswith("distribax"):
            # An override without words of its own has those of its base.
            doc = inspect.getdoc(getattr(value, attribute)) or ""
            yield from _gaps_of_function(f"{name}.{attribute}", member, doc)


def _gaps_of_property(name: str, function: FunctionType, doc: str) -> Iterator[str]:
    if not doc:
        yield f"{name}: no docstring"
    elif "Raises:" not in doc and _raises(function):
        yield f"{name}: raises, but has no 'Raises:'"


def _gaps_of_function(name: str, function: FunctionType, doc: str) -> Iterator[str]:
    if not doc:
        yield f"{name}: no docstring"
        return
    parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    # The constructor of a dataclass takes its attributes.
    listed = "Args:" in doc or (_is_generated(function) and "Attributes:" in doc)
    if parameters and not listed:
        yield f"{name}: takes {', '.join(parameters)} but has no 'Args:'"
    elif missing := [p for p in parameters if not re.search(rf"^ *\*{{0,2}}{p}\b.*:", doc, re.M)]:
        yield f"{name}: 'Args:' does not mention {', '.join(missing)}"
    returned = inspect.signature(function).return_annotation
    gives = returned not in (inspect.Signature.empty, None, "None", "Never", "NoReturn")
    if gives and parameters and "Returns:" not in doc and "Yields:" not in doc:
        yield f"{name}: returns {returned} but has no 'Returns:'"
    if "Raises:" not in doc and _raises(function):
        yield f"{name}: raises, but has no 'Raises:'"


def _is_generated(function: FunctionType) -> bool:
    return function.__code__.co_filename == "<string>"


def _raises(function: FunctionType) -> bool:
    if _is_generated(function):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return any(node.exc is not None for node in raised)

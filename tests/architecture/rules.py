"""The rules of the source tree, each a function that returns the violations it finds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.source_tree import Module, imported_names, internal_imports

LAYERS = (
    "cli",
    "integrations",
    "estimator",
    "contrib",
    "coordinator",
    "parameter_server",
    "strategies",
    "training",
    "data",
    "variables",
    "execution",
    "context",
    "collectives",
    "values",
    "cluster",
    "topology",
    "jax_private",
    "progress",
)
"""Top to bottom; a module imports from its own layer and from those that come after it."""

BOTTOM = ("types", "errors", "contracts")
"""The modules that every layer may import."""

OPEN_LAYER = "testing"
"""May import everything; nobody imports it."""

MAX_LINES = 500
VAGUE_NAME = re.compile(r".*_(utils?|lib)")
UNSTABLE_JAX = ("jax._src", "jax.extend", "jax.experimental", "jax.interpreters", "jaxlib")
UNSTABLE_JAX_HOME = "jax_private"

NAMED_AS_OTHERS = ("contracts", "contrib")
"""Protocols have the names of the classes they stand for, and `contrib` those of TensorFlow 1.9."""

# The command line is above the package's face: it uses the library as a user does.
_FACE = 1
_ORDER = {LAYERS[0]: 0} | {name: i + 2 for i, name in enumerate(LAYERS[1:])}
_BOTTOM = len(LAYERS) + 2
_OPEN = -1


def _height(module: Module) -> int | None:
    """Returns the number of a module's layer, counted from the top; None if it is in no layer."""
    match module.parts:
        case ():
            return _FACE
        case ("__main__",):
            return 0
        case (name,) if not module.is_package:
            return _BOTTOM if name in BOTTOM else _FACE
        case (name, *_):
            return _OPEN if name == OPEN_LAYER else _ORDER.get(name)
    return None


def unknown_layers(modules: dict[str, Module]) -> list[str]:
    """Every folder of the package is a layer."""
    return [f"{m.path}: not in a known layer" for m in modules.values() if _height(m) is None]


def upward_imports(modules: dict[str, Module]) -> list[str]:
    """A module imports only from its own layer and lower ones, and never from `testing`."""
    found: list[str] = []
    for item in internal_imports(modules):
        source, target = _height(item.source), _height(modules[item.target])
        if source is None or target is None:
            continue
        if target < source:
            found.append(str(item))
    return found


def import_cycles(modules: dict[str, Module]) -> list[str]:
    """No module imports itself, directly or through others, wherever the imports stand."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for item in internal_imports(modules):
        graph[item.source.name].add(item.target)
    return [" -> ".join(cycle) for cycle in _cycles(graph)]


def _cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yields one cycle for each edge that leads back to a node that is being visited."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        path.append(node)
        for neighbour in sorted(graph[node]):
            if neighbour in path:
                yield [*path[path.index(neighbour) :], neighbour]
            elif neighbour not in done:
                yield from visit(neighbour)
        path.pop()
        done.add(node)

    for node in sorted(graph):
        if node not in done:
            yield from visit(node)


def faces_with_code(modules: dict[str, Module]) -> list[str]:
    """The package's `__init__` and the modules beside it only re-export, at most on use."""
    found: list[str] = []
    for module in modules.values():
        if _height(module) != _FACE:
            continue
        for node in module.tree.body:
            if not _is_re_export(node):
                found.append(f"{module.path}:{node.lineno}: only re-exports belong here")
    return found


def _is_re_export(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assign() | ast.AnnAssign():
            return True
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.FunctionDef(name="__getattr__" | "__dir__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return all(map(_is_re_export, [*node.body, *node.orelse]))
    return False


def unstable_jax_names(modules: dict[str, Module]) -> list[str]:
    """Names of JAX that are not stable stand in one module."""
    found: list[str] = []
    for module in modules.values():
        if module.parts[:1] == (UNSTABLE_JAX_HOME,):
            continue
        used = [*imported_names(module), *_attributes_of_jax(module.tree)]
        for name, line in sorted(used, key=lambda use: use[1]):
            if any(name == bad or name.startswith(f"{bad}.") for bad in UNSTABLE_JAX):
                found.append(f"{module.path}:{line}: {name} belongs into {UNSTABLE_JAX_HOME}")
    return found


def _attributes_of_jax(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="jax"), attr=attr):
                yield f"jax.{attr}", node.lineno


def questions_of_wrappers(modules: dict[str, Module]) -> list[str]:
    """Whether something is wrapped is asked with `is_wrapped`: variables may be instances too."""
    found: list[str] = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    named = {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)}
                    if "DistributedValues" in named:
                        found.append(f"{module.path}:{node.lineno}: ask is_wrapped() instead")
    return found


def names_of_two_classes(modules: dict[str, Module]) -> list[str]:
    """A class's name says which class it is, wherever it stands."""
    found: list[str] = []
    places: dict[str, Path] = {}
    for module in modules.values():
        if module.parts[:1] and module.parts[0] in NAMED_AS_OTHERS:
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            first = places.setdefault(node.name.lstrip("_"), module.path)
            if first != module.path:
                found.append(f"{module.path}:{node.lineno}: {node.name} is a class of {first} too")
    return found


def long_files(paths: Iterable[Path]) -> list[str]:
    """No file is longer than 500 lines."""
    lengths = ((path, len(path.read_text().splitlines())) for path in paths)
    return [f"{path}: {length} lines" for path, length in lengths if length > MAX_LINES]


def vague_names(paths: Iterable[Path]) -> list[str]:
    """No file or folder is named for being a collection of odds and ends."""
    return [
        f"{path}: say what is in it"
        for path in paths
        if any(VAGUE_NAME.fullmatch(part.removesuffix(".py")) for part in path.parts)
    ]

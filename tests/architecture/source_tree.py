"""A package's modules and their imports, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its syntax tree, and whether it is a package's `__init__`."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def parts(self) -> tuple[str, ...]:
        """The dotted name below the root package, empty for the root's `__init__`."""
        return tuple(self.name.split(".")[1:])

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """An import of one module by another, wherever in the file it stands."""

    source: Module
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}: {self.source.name} imports {self.target}"


def read_package(root: Path) -> dict[str, Module]:
    """Returns the modules of the package in the folder `root` by name."""
    modules: dict[str, Module] = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        modules[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    return modules


def _named_modules(node: ast.AST, module: Module) -> Iterator[str]:
    """Yields every dotted name that a node imports, `from a import b` as `a.b`."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=base, names=names, level=level):
            if level:
                package = module.name.split(".")
                package = package[: len(package) - level + module.is_package]
                base = ".".join([*package, base] if base else package)
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__")
            | ast.Attribute(attr="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def imported_names(module: Module) -> Iterator[tuple[str, int]]:
    """Yields all names a module imports, with the line: at the top, in functions, for typing."""
    for node in ast.walk(module.tree):
        for name in _named_modules(node, module):
            yield name, getattr(node, "lineno", 0)


def internal_imports(modules: dict[str, Module]) -> list[Import]:
    """Returns the imports among the modules; `from a import f` is one of `a` if f is no module."""
    imports: list[Import] = []
    for module in modules.values():
        for name, line in imported_names(module):
            target = name
            while target not in modules and "." in target:
                target = target.rpartition(".")[0]
            if target in modules:
                imports.append(Import(module, target, line))
    return imports

"""The examples in docstrings are true: each docstring that has some is run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import distribax as dx

_ROOT = Path(dx.__file__).parent
_OPTIONAL = {"flax", "keras", "pyarrow", "ray", "sklearn", "tensorflow", "torch"}
"""Packages that an example may need and that need not be installed."""


@dataclass(frozen=True)
class Docstring:
    """A docstring with examples, and where it is."""

    module: str
    path: Path
    name: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def missing(self) -> list[str]:
        """Returns the optional packages that the examples import and that are not there."""
        imported = set(re.findall(r"^\s*>>> (?:import|from) (\w+)", self.text, re.MULTILINE))
        return sorted(p for p in imported & _OPTIONAL if importlib.util.find_spec(p) is None)


def _docstrings(path: Path, root: Path = _ROOT) -> Iterator[Docstring]:
    """Yields the docstrings of a file that have examples.

    They are read from the source: doctest's own search does not see behind decorators.
    """
    parts = path.relative_to(root.parent).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    source = path.read_text()
    if ">>> " not in source:
        return  # To parse all files at every collection would take seconds.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=True)
            if text and ">>> " in text:
                name = getattr(node, "name", "module")
                yield Docstring(module, path, name, node.body[0].lineno - 1, text)


ALL = [found for path in sorted(_ROOT.rglob("*.py")) for found in _docstrings(path)]


def _run(docstring: Docstring, names: dict[str, object]) -> str:
    """Runs the examples and returns what differed; nothing when they are true."""
    parser = doctest.DocTestParser()
    test = parser.get_doctest(
        docstring.text, names, str(docstring), str(docstring.path), docstring.line
    )
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("docstring", ALL, ids=str)
def test_examples_are_true(docstring: Docstring) -> None:
    if missing := docstring.missing():
        pytest.skip(f"the example needs {', '.join(missing)}")
    names = dict(vars(importlib.import_module(docstring.module)))
    if report := _run(docstring, names):
        pytest.fail(report, pytrace=False)


def test_examples_are_found_behind_decorators() -> None:
    found = {str(docstring) for docstring in ALL}
    assert "distribax.strategies.extended:colocate_vars_with" in found
    assert "distribax.execution.functions.decorator:function" in found


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "package" / "wrong.py"
    path.parent.mkdir()
    path.write_text('def f():\n    """Adds.\n\n    >>> 1 + 1\n    3\n    """\n')
    (docstring,) = _docstrings(path, root=path.parent)
    assert str(docstring) == "package.wrong:f"
    report = _run(docstring, {})
    assert "Expected:\n    3\nGot:\n    2" in report
    assert "line 4" in report

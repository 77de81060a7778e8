"""The source tree keeps its layers; and every rule is shown to notice when it does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.source_tree import Module, read_package

PROJECT = Path(__file__).parents[2]
PACKAGE_RULES = (
    rules.unknown_layers,
    rules.upward_imports,
    rules.import_cycles,
    rules.faces_with_code,
    rules.unstable_jax_names,
    rules.questions_of_wrappers,
    rules.names_of_two_classes,
)

PackageRule = Callable[[dict[str, Module]], list[str]]


def _source_files(*folders: str) -> list[Path]:
    """Returns our source files below the folders, relative to the project."""
    paths = (path for folder in folders for path in (PROJECT / folder).rglob("*.py"))
    relative = (path.relative_to(PROJECT) for path in paths)
    # Folders with a dot hold other people's code: virtual environments and caches.
    return [path for path in relative if not any(part.startswith(".") for part in path.parts)]


@functools.cache
def _read_distribax() -> dict[str, Module]:
    """Reads the package once: its syntax trees take seconds."""
    return read_package(PROJECT / "src" / "distribax")


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: PackageRule) -> None:
    modules = _read_distribax()
    assert "distribax.topology.mesh" in modules
    assert rule(modules) == []


def test_no_file_is_too_long() -> None:
    paths = [PROJECT / path for path in _source_files("src", "tests", "benchmarks", "examples")]
    assert rules.long_files(paths) == []


def test_no_file_has_a_vague_name() -> None:
    assert rules.vague_names(_source_files("src", "tests", "benchmarks", "examples")) == []


def _package(folder: Path, files: dict[str, str]) -> dict[str, Module]:
    """Writes a small package and reads it."""
    root = folder / "distribax"
    for name, text in ({"__init__.py": ""} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_package(root)


ALLOWED = {
    "__init__.py": '"""Doc."""\nfrom distribax.data.dataset import Dataset as Dataset\n'
    "def __getattr__(name): ...\n",
    "__main__.py": "import distribax.cli\n",
    "cli/__init__.py": "import distribax as dx\n",
    "data/__init__.py": "from distribax.data.dataset import Dataset as Dataset\n",
    "data/dataset.py": "from distribax import jax_private\nfrom distribax.topology import mesh\n",
    "topology/__init__.py": "",
    "topology/mesh.py": "from distribax.types import Nest\nimport jax\njax.jit\n",
    "types.py": "",
    "jax_private/__init__.py": "from jax._src import core\nimport jax.experimental\n",
    "testing/__init__.py": "from distribax.data import Dataset\nimport distribax.cli\n",
}


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_a_good_package_has_no_violation(rule: PackageRule, tmp_path: Path) -> None:
    assert rule(_package(tmp_path, ALLOWED)) == []


@pytest.mark.parametrize(
    ("rule", "files", "message"),
    [
        (rules.unknown_layers, {"helpers/__init__.py": ""}, "not in a known layer"),
        (
            rules.upward_imports,
            {"topology/a.py": "from distribax.data import Dataset"},
            "a.py:1: distribax.topology.a imports distribax.data",
        ),
        (
            rules.upward_imports,
            {"values/a.py": "def f():\n    from distribax.data import dataset\n"},
            "distribax.values.a imports distribax.data.dataset",
        ),
        (
            rules.upward_imports,
            {"values/a.py": "if TYPE_CHECKING:\n    import distribax.data.dataset\n"},
            "distribax.values.a imports distribax.data.dataset",
        ),
        (
            rules.upward_imports,
            {"values/a.py": "import importlib\nimportlib.import_module('distribax.data')"},
            "a.py:2: distribax.values.a imports distribax.data",
        ),
        (
            rules.upward_imports,
            {"topology/a.py": "from ..data import dataset"},
            "distribax.topology.a imports distribax.data.dataset",
        ),
        (
            rules.upward_imports,
            {"types.py": "from distribax.topology.mesh import x"},
            "distribax.types imports distribax.topology.mesh",
        ),
        (
            rules.upward_imports,
            {"strategies/a.py": "import distribax as dx"},
            "distribax.strategies.a imports distribax",
        ),
        (
            rules.upward_imports,
            {"cli/a.py": "from distribax.testing import x"},
            "distribax.cli.a imports distribax.testing",
        ),
        (rules.upward_imports, {"__init__.py": "import distribax.cli"}, "imports distribax.cli"),
        (
            rules.import_cycles,
            {
                "data/a.py": "import distribax.data.b",
                "data/b.py": "def f():\n    from distribax.data import a\n",
            },
            "distribax.data.a -> distribax.data.b -> distribax.data.a",
        ),
        (
            rules.import_cycles,
            {
                "data/__init__.py": "from .a import f",
                "data/a.py": "from distribax.data import g",
            },
            "distribax.data -> distribax.data.a -> distribax.data",
        ),
        (rules.faces_with_code, {"__init__.py": "def f(): ..."}, "only re-exports belong here"),
        (rules.faces_with_code, {"metrics.py": "class Mean: ..."}, "metrics.py:1"),
        (
            rules.faces_with_code,
            {"__init__.py": "if TYPE_CHECKING:\n    print()\n"},
            "only re-exports belong here",
        ),
        (rules.unstable_jax_names, {"data/a.py": "import jax.experimental.x"}, "a.py:1"),
        (rules.unstable_jax_names, {"data/a.py": "from jax import extend"}, "jax.extend"),
        (rules.unstable_jax_names, {"data/a.py": "from jax._src.core import x"}, "jax._src.core"),
        (
            rules.unstable_jax_names,
            {"data/a.py": "import jax\ndef f():\n    return jax.interpreters.ad.x\n"},
            "a.py:3: jax.interpreters",
        ),
        (
            rules.questions_of_wrappers,
            {"values/a.py": "isinstance(x, (int, DistributedValues))"},
            "a.py:1: ask is_wrapped()",
        ),
        (
            rules.names_of_two_classes,
            {"data/a.py": "class Part: ...", "values/b.py": "class _Part: ..."},
            "b.py:1: _Part is a class of",
        ),
    ],
)
def test_rule_notices(
    rule: PackageRule, files: dict[str, str], message: str, tmp_path: Path
) -> None:
    violations = rule(_package(tmp_path, ALLOWED | files))
    assert len(violations) == 1
    assert message in violations[0]


def test_long_file_is_noticed(tmp_path: Path) -> None:
    longest, too_long = tmp_path / "a.py", tmp_path / "b.py"
    longest.write_text("x = 1\n" * rules.MAX_LINES)
    too_long.write_text("x = 1\n" * (rules.MAX_LINES + 1))
    assert rules.long_files([longest, too_long]) == [f"{too_long}: 501 lines"]


@pytest.mark.parametrize("name", ["a_util.py", "a_utils.py", "a_lib.py", "a_utils/b.py"])
def test_vague_name_is_noticed(name: str) -> None:
    fine = Path("src/library/utility.py")
    assert rules.vague_names([fine, Path("src", name)]) == [f"src/{name}: say what is in it"]

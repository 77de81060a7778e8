"""The API reference has every public name, and every name on it leads to its entry."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from distribax import data, types
from tests.architecture.reference import public_objects

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = _ROOT / "docs" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look for their module there.
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_an_entry(reference: ModuleType) -> None:
    entries = set(re.findall(r"^::: (\S+)$", "\n".join(reference.make_pages().values()), re.M))
    names = reference.find_public_names()
    assert {name.path for name in names} | set(reference.CONSTANTS) == entries
    shown = {id(name.value) for name in names}
    missing = [path for path, value in public_objects().items() if id(value) not in shown]
    # Every face answers for missing names with this function.
    assert [path for path in missing if not path.endswith("explain_missing")] == []


def test_every_public_constant_has_an_entry(reference: ModuleType) -> None:
    found = set()
    for face in ("distribax.data", "distribax.data.experimental", "distribax.contrib.distribute"):
        module = importlib.import_module(face)
        found |= {f"{face}.{name}" for name in vars(module) if name.isupper()}
    # tf.data.experimental repeats the names of tf.data.
    found -= {f"distribax.data.experimental.{name}" for name in vars(data) if name.isupper()}
    found |= {f"distribax.types.{name}" for name in vars(types) if name.endswith("EXIT_CODE")}
    assert found == set(reference.CONSTANTS)


def test_every_page_of_the_reference_is_in_the_navigation(reference: ModuleType) -> None:
    # The file has no tags of mkdocs, so that a plain loader reads it.
    nav = yaml.safe_load((_ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"reference/\w+\.md", str(nav))
    assert sorted(listed) == sorted(reference.make_pages())


def test_pages_name_what_users_write(reference: ModuleType) -> None:
    pages = reference.make_pages()
    assert 'heading: "dx.MirroredStrategy"' in pages["reference/strategies.md"]
    assert "| [`dx.data.Dataset`][distribax.data.Dataset] |" in pages["reference/index.md"]
    # An old name is an alias of the new one, not an entry of its own.
    assert "`dx.experimental.CentralStorageStrategy`" in pages["reference/strategies.md"]

"""The migration guide's table of names is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

_SCRIPT = Path(__file__).parents[2] / "docs" / "names_table.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names_table", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date() -> None:
    table = _load()
    page = table.PAGE.read_text()
    assert page == table.insert_table(page), "run python docs/names_table.py"

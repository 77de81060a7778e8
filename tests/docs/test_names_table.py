"""What scripts write into the documentation is up to date: the table of names, the chart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_DOCS = Path(__file__).parents[2] / "docs"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look for their module there.
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date() -> None:
    table = _load("names_table")
    page = table.PAGE.read_text()
    assert page == table.insert_table(page), "run python docs/names_table.py"


def test_the_chart_is_up_to_date() -> None:
    chart = _load("benchmark_chart")
    assert chart.CHART.read_text() == chart.draw(chart.PAGE.read_text()), (
        "run python docs/benchmark_chart.py"
    )

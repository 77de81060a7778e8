"""docs/security.md names a test for each threat and each parser; the tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize("title", ["Threats", "Parsers under random input"])
def test_every_line_has_a_test(title: str) -> None:
    page = (_ROOT / "docs/security.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) > 10
    for line in lines:
        found = _TEST.search(line)
        assert found is not None, f"no test is named in: {line}"
        module = ast.parse((_ROOT / found[1]).read_text())
        names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        assert found[2] in names, f"{found[1]} has no {found[2]}"

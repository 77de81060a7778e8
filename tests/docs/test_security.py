"""docs/security.md names a test for each threat; the tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_threat_has_a_test() -> None:
    page = (_ROOT / "docs/security.md").read_text()
    lines = page.split("## Threats")[1].split("|---|---|---|\n")[1].strip().splitlines()
    assert len(lines) > 20
    for line in lines:
        found = _TEST.search(line)
        assert found is not None, f"no test is named in: {line}"
        module = ast.parse((_ROOT / found[1]).read_text())
        names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        assert found[2] in names, f"{found[1]} has no {found[2]}"

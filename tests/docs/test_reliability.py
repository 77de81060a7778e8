"""docs/reliability.md names a test for each promise; the tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`((?:[\w.]+/)*test_\w+\.py)(?:::(test_\w+))?`")
_SAME_FILE = re.compile(r"`(test_\w+)`")


def test_named_tests_exist() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    named = _NAMED.findall(text)
    assert len(named) > 10
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for name, function in named:
        found = [source for path, source in files.items() if str(path).endswith(f"/{name}")]
        assert found, f"there is no {name}"
        assert any(f"def {function}" in source for source in found), f"{name} has no {function}"
    for function in _SAME_FILE.findall(text):
        assert any(f"def {function}(" in source for source in files.values()), function

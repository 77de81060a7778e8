"""What mkdocs does to a page before it is rendered."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drops the mark of blocks that the tests do not run: Python-Markdown knows one word only."""
    return markdown.replace("```python notest", "```python")

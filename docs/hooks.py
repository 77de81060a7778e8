"""What mkdocs does to the pages: adds the reference, turns code blocks into sessions and tabs."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

_SESSION = re.compile(r"^```python\n(?=>>>)", re.MULTILINE)
_LABELLED = re.compile(r"^([^\n|#>*-][^\n]*):\n\n(```[^\n]*\n.*?^```\n)", re.MULTILINE | re.DOTALL)
"""A line that names a block, such as "TensorFlow:", and the block."""
_TAB_LABELS = re.compile(r"TensorFlow|distribax|JAX|jit and NamedSharding|shard_map|pmap")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the pages of the API reference."""
    for path, text in _load("reference_pages").make_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Prepares the blocks of a page, which is plain Markdown in the repository."""
    # The mark of blocks that the tests do not run: Python-Markdown knows one word only.
    markdown = markdown.replace("```python notest", "```python")
    markdown = make_tabs(markdown)
    return _SESSION.sub("```pycon\n", markdown)


def make_tabs(markdown: str) -> str:
    """Turns labelled blocks that follow each other, "TensorFlow:" and "distribax:", into tabs."""
    blocks = [m for m in _LABELLED.finditer(markdown) if _TAB_LABELS.fullmatch(m[1])]
    groups: list[list[re.Match[str]]] = []
    for block in blocks:
        if groups and not markdown[groups[-1][-1].end() : block.start()].strip():
            groups[-1].append(block)
        else:
            groups.append([block])
    for group in reversed([g for g in groups if len(g) > 1]):
        tabs = "\n".join(f'=== "{m[1]}"\n\n{textwrap.indent(m[2], "    ")}' for m in group)
        markdown = markdown[: group[0].start()] + tabs + markdown[group[-1].end() :]
    return markdown


def _load(name: str) -> ModuleType:
    """Imports a file of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module by its name.

    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

"""Every Python block of README.md and docs/ runs, and every link and name in them exists."""

from __future__ import annotations

import doctest
import gc
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import distribax as dx

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_PROSE_PAGES = [*_PAGES, _ROOT / "CHANGELOG.md", _ROOT / "CONTRIBUTING.md"]
_WIDTH = 100
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_NAME = re.compile(r"\bdx((?:\.[A-Za-z_]\w*)+)")
_DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced Python block: its text, where it begins, and whether it is to be run."""

    text: str
    line: int
    run: bool


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_are() -> Iterator[None]:
    """The pages show how logs are set up, which must not reach other tests."""
    root = logging.getLogger()
    names = [name for name in logging.root.manager.loggerDict if name.startswith("distribax")]
    names += ["distribax", "distribax.cluster", "distribax.data"]
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, names))}
    handlers = list(root.handlers)
    yield
    for logger, level in levels.items():
        logger.setLevel(level)
    root.handlers[:] = handlers


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        language, *words = match[1].split() or [""]
        if language == "python":
            line = text.count("\n", 0, match.start(2)) + 1
            yield Block(match[2], line, "notest" not in words)


def _prose(page: Path) -> str:
    """Returns the text of a page outside its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def _long_lines(page: Path) -> Iterator[str]:
    """Yields the lines of prose that are wider than the code; a table's row is one line."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        text = line.strip()
        fenced ^= text.startswith("```")
        if not fenced and len(line) > _WIDTH and " " in text and not text.startswith(("|", "#")):
            yield f"{page.relative_to(_ROOT)}:{number}: {len(line)} columns"


@pytest.mark.parametrize("page", _PROSE_PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    assert list(_long_lines(page)) == []


def _run(block: Block, page: Path, names: dict[str, Any]) -> None:
    # Empty lines before the code give tracebacks the line numbers of the page.
    padded = "\n" * (block.line - 1) + block.text
    if block.run and not block.text.lstrip().startswith(">>>"):
        exec(compile(padded, str(page), "exec"), names)
    elif block.run:
        _run_session(block, page, names)
    else:
        compile(padded, str(page), "exec")


def _run_session(block: Block, page: Path, names: dict[str, Any]) -> None:
    name = str(page.relative_to(_ROOT))
    test = doctest.DocTestParser().get_doctest(block.text, {}, name, str(page), block.line - 1)
    test.globs = names
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=_DOCTEST_FLAGS)
    runner.run(test, out=report.append, clear_globs=False)
    if report:
        pytest.fail("".join(report), pytrace=False)


def _page_id(page: Path) -> str:
    return str(page.relative_to(_ROOT))


# The page about parameter servers takes more than 10 s: it starts workers and servers, twice.
@pytest.mark.parametrize("page", _PAGES, ids=_page_id)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order and share their names, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in _blocks(page):
            _run(block, page, names)
    finally:
        # Iterators that a page has left in the middle end their threads when they are gone.
        names.clear()
        gc.collect()


@pytest.mark.parametrize("page", _PAGES, ids=_page_id)
def test_links_lead_somewhere(page: Path) -> None:
    relative = [link for link in _LINK.findall(_prose(page)) if "://" not in link]
    missing = [
        link
        for link in relative
        if not _has_target((page.parent / link.partition("#")[0]).resolve(), page, link)
    ]
    assert not missing


def _has_target(target: Path, page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = target if file else page
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", target.read_text()), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", _PAGES, ids=_page_id)
def test_names_exist(page: Path) -> None:
    """Every `dx.something` that a page speaks of is there."""

    def exists(path: str) -> bool:
        found: Any = dx
        for part in path.strip(".").split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True

    names = sorted(set(_NAME.findall(page.read_text())))
    assert [f"dx{name}" for name in names if not exists(name)] == []


def test_there_are_pages() -> None:
    """The search for pages and blocks finds something, so the tests above are not empty."""
    found = {_page_id(page): len(list(_blocks(page))) for page in _PAGES}
    assert found["README.md"] >= 1
    assert found["docs/guide/input.md"] >= 10

"""The web site: it builds without a warning, its links lead somewhere, and a browser shows it."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.docs import browser

pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")

_ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.site, pytest.mark.multiprocess]
needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; `make docs` has built it and names it."""
    if built := os.environ.get("DISTRIBAX_SITE"):
        return Path(built).resolve()
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> list[str]:
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert "index.html" in found, f"the site was not built: {site}"
    return [page for page in found if page != "404.html"]


class _Links(HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if value and ((tag, name) in (("a", "href"), ("img", "src"), ("link", "href"))):
                self.links.append(value)


def test_links_and_anchors_lead_somewhere(site: Path, pages: list[str]) -> None:
    parsed: dict[Path, _Links] = {}
    for page in pages:
        parser = parsed[(site / page).resolve()] = _Links()
        parser.feed((site / page).read_text())
    broken: list[str] = []
    for page, found in parsed.items():
        for link in found.links:
            target, anchor = urldefrag(unquote(link))
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            file = file / "index.html" if file.is_dir() else file
            known = parsed[file].anchors if file in parsed else set()
            if not file.exists() or (anchor and file in parsed and anchor not in known):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_names_can_be_linked(site: Path, pages: list[str]) -> None:
    text = "".join((site / page).read_text() for page in pages if page.startswith("reference"))
    for name in ("distribax.MirroredStrategy", "distribax.data.Dataset.shuffle"):
        assert f'id="{name}"' in text


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@needs_chromium
def test_pages_open_without_errors_and_fit(address: str, pages: list[str], tmp_path: Path) -> None:
    """No page logs an error, asks another host for anything, or is wider than its window."""
    widest = (
        "[...document.querySelectorAll('.md-typeset__table')]"
        ".filter(table => table.scrollWidth > table.parentElement.clientWidth + 1).length"
    )
    with browser.open_browser(tmp_path) as page:
        for name in pages:
            page.set_width(1280)
            page.open(f"{address}/{name}")
            assert page.problems() == [], name
            requests = page.requests()
            assert [r for r in requests if not r.startswith((address, "data:"))] == [], name
            assert page.evaluate(widest) == 0, f"{name}: a table is wider than 1280 px allow"
            for width in (1280, 390):
                page.set_width(width, mobile=width < 1000)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name


@needs_chromium
def test_the_site_answers(address: str, tmp_path: Path) -> None:
    """Search, dark mode, tabs, and the copy button of a session work."""
    with browser.open_browser(tmp_path) as page:
        page.set_width(1280)
        page.open(f"{address}/guide/migrating.html")
        labels = page.evaluate(
            "[...document.querySelectorAll('.tabbed-labels')].map(l => l.innerText.trim())"
        )
        assert len(labels) >= 3 and all("TensorFlow" in label for label in labels)
        copied = page.evaluate("document.querySelector('.language-pycon code').dataset.copy")
        assert copied == "sum(last) < 0.1 * sum(first)"
        page.evaluate("document.querySelector('[for=__palette_1]').click()")
        assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        first_hit = page.evaluate(_SEARCH)
        assert "MirroredStrategy" in first_hit


_SEARCH = """
new Promise((resolve) => {
  const field = document.querySelector(".md-search__input");
  field.focus();
  field.value = "MirroredStrategy";
  field.dispatchEvent(new Event("keyup", {bubbles: true}));
  field.dispatchEvent(new Event("input", {bubbles: true}));
  const look = () => {
    const hit = document.querySelector(".md-search-result__item");
    hit ? resolve(hit.innerText) : setTimeout(look, 100);
  };
  look();
})
"""

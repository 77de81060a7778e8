"""Charts as PNG, drawn by a browser of this machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SCALE: Final = 2
"""Pixels for each unit of the picture, so that it is sharp on screens with small pixels."""
_SECONDS: Final = 120


def write_png(svg: str, width: int, height: int, path: Path) -> None:
    """Writes an SVG picture as PNG.

    Args:
        svg: The picture.
        width: Its width.
        height: Its height.
        path: The file to write.

    Raises:
        ValueError: This machine has no browser that could draw it, or the browser failed.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ValueError(
            f"--png={path} needs a browser to draw with: {', '.join(BROWSERS[:-1])} or "
            f"{BROWSERS[-1]}. Install one, or use --svg, which needs none."
        )
    with tempfile.TemporaryDirectory(prefix="distribax-png-") as folder:
        page = Path(folder) / "chart.html"
        page.write_text(f"<!doctype html><style>body {{ margin: 0 }}</style>{svg}")
        command = [
            browser,
            "--headless",
            "--no-sandbox",  # The page is ours, and root has no sandbox.
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--force-device-scale-factor={_SCALE}",
            f"--window-size={width},{height}",
            f"--screenshot={Path(folder) / 'chart.png'}",
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        drawn = Path(folder) / "chart.png"
        if not drawn.exists():
            raise ValueError(f"--png={path}: {browser} has drawn nothing: {done.stderr.strip()}")
        shutil.copyfile(drawn, path)

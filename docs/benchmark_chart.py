"""Draws images/benchmarks.svg from the tables of benchmarks.md: python docs/benchmark_chart.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent / "benchmarks.md"
CHART = Path(__file__).parent / "images" / "benchmarks.svg"

_COLORS = {"distribax": "#4f46e5", "JAX": "#0d9488", "TensorFlow": "#f59e0b", "torch": "#dc2626"}
_WIDTH, _LABEL_WIDTH, _BAR_HEIGHT = 920, 300, 22


@dataclass(frozen=True)
class Bar:
    """One row of a table: whose time it is, and how long it took."""

    label: str
    milliseconds: float

    @property
    def color(self) -> str:
        """The color of the library."""
        return next(color for name, color in _COLORS.items() if name in self.label)


@dataclass(frozen=True)
class Panel:
    """The bars of one benchmark, and where they are on the page."""

    title: str
    section: str
    table_head: str
    rows: tuple[str, ...]

    def read(self, page: str) -> list[Bar]:
        """Returns the bars: the first figure of the rows that begin as named."""
        section = page.split(f"\n## {self.section}\n")[1].split("\n## ")[0]
        table = section[section.index(self.table_head) :].split("\n\n")[0]
        cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        found = {_plain(row[0]): float(re.split(r"[^\d.]", row[1])[0]) for row in cells}
        return [Bar(row, found[row]) for row in self.rows]


PANELS = (
    Panel(
        "2 devices of one machine: ms for a step",
        "Training step",
        "| side | batch 256, ms |",
        (
            "distribax, dx.Variable",
            "JAX by hand: shard_map, jit, donated",
            "TensorFlow, variables, fused Adam op",
            "TensorFlow, Keras model and optimizer",
            "torch DDP, gloo, 1 thread per process",
        ),
    ),
    Panel(
        "2 processes: ms for a step",
        "Many machines, in step",
        "| side | batch 256, ms |",
        (
            "distribax, dx.Variable",
            "JAX by hand on jax.distributed",
            "TensorFlow, fused Adam op",
            "TensorFlow, Keras",
            "torch DDP, fused Adam and gradients in buckets",
        ),
    ),
    Panel(
        "Parameter servers, 2 workers: ms for a step",
        "Parameter servers",
        "| MLP, SGD, batch 128 |",
        (
            "distribax",
            "TensorFlow, its own SGD operation, one thread per worker",
            "TensorFlow, Keras optimizer",
        ),
    ),
)


def _plain(cell: str) -> str:
    return cell.replace("*", "").replace("`", "")


def draw(page: str) -> str:
    """Returns the chart of the tables of the page, as SVG."""
    parts: list[str] = []
    top = 10
    for panel in PANELS:
        bars = panel.read(page)
        longest = max(bar.milliseconds for bar in bars)
        parts.append(_text(10, top + 18, panel.title, 'font-weight="600"'))
        top += 30
        for bar in bars:
            width = round((_WIDTH - _LABEL_WIDTH - 90) * bar.milliseconds / longest)
            size = f'width="{width}" height="{_BAR_HEIGHT - 4}" rx="2"'
            parts += [
                _text(_LABEL_WIDTH, top + 15, _shorten(bar.label), 'text-anchor="end"'),
                f'<rect x="{_LABEL_WIDTH + 8}" y="{top}" {size} fill="{bar.color}"/>',
                _text(_LABEL_WIDTH + width + 14, top + 15, f"{bar.milliseconds:g}"),
            ]
            top += _BAR_HEIGHT
        top += 14
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#1f2937"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" {style}>'
    title = "<title>Time of a training step, by library</title>"
    ground = f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>'
    return "\n".join([head, title, ground, *parts, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{text}</text>'


def _shorten(label: str) -> str:
    """Returns a label that fits beside its bar."""
    label = label.replace("its own SGD operation, one thread per worker", "fused SGD")
    return label.replace("fused Adam and gradients in buckets", "fused Adam, buckets")


if __name__ == "__main__":
    CHART.write_text(draw(PAGE.read_text()))

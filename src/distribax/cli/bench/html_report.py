"""The report as one HTML file, which needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from distribax.cli.bench.charts import draw
from distribax.cli.bench.figures import Report, ReportTable

_STYLE: Final = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #202124; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #dadce0; text-align: right }
th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
.failed { color: #c5221f }
@media (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #202124 } th, td { border-color: #5f6368 } }
"""


def write_html(reports: Sequence[Report], machine: Mapping[str, Any]) -> str:
    """Returns the page: the machine, and the charts and tables of each report."""
    about = ", ".join(f"{name}: {value}" for name, value in machine.items())
    sections = [_write_section(report) for report in reports]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>distribax bench</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>distribax bench</h1>\n<p>{escape(about)}</p>\n" + "\n".join(sections) + "\n"
        "<p>Values are medians; thin lines and brackets are quartiles. Sides take turns, so that "
        "what slows down the machine slows down all of them.</p>\n</body>\n</html>\n"
    )


def _write_section(report: Report) -> str:
    parts = [f"<h2>{escape(report.name)}</h2>"]
    if report.charts:
        parts.append(draw(report.charts))
    parts += [_write_table(table) for table in report.tables]
    parts += [f'<p class="failed">{escape(failure)}</p>' for failure in report.failures]
    return "\n".join(parts)


def _write_table(table: ReportTable) -> str:
    def write_row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    rows = "".join(write_row(row, "td") for row in table.rows)
    return (
        f"<h3>{escape(table.title)}</h3><table><thead>{write_row(table.columns, 'th')}</thead>"
        f"<tbody>{rows}</tbody></table>"
    )

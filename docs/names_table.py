"""Writes the table of names into the migration guide: `python docs/names_table.py`."""

from __future__ import annotations

from pathlib import Path

from distribax.contrib.tensorflow_names import read_table

PAGE = Path(__file__).parent / "guide" / "migrating.md"
BEGIN = "<!-- The table is written by docs/names_table.py. -->"
END = "<!-- The end of the table. -->"


def make_table() -> str:
    """Returns the table as Markdown."""
    rows = sorted(read_table(), key=lambda row: row.tensorflow.lower())
    lines = ["| TensorFlow | distribax | difference |", "|---|---|---|"]
    for row in rows:
        # What is no name is a phrase.
        here = row.here if " " in row.here else f"`{row.here}`"
        lines.append(f"| `tf.{row.tensorflow}` | {here} | {row.differs} |")
    return "\n".join(lines)


def insert_table(page: str) -> str:
    """Returns the page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{make_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text()))

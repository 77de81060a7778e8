"""The page about the command line mentions every command and every option."""

from __future__ import annotations

import argparse
from pathlib import Path

from distribax.cli.main import make_parser

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "command_line.md"


def test_every_option_is_on_the_page() -> None:
    text = PAGE.read_text()
    (commands,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name, parser in commands.choices.items():
        _, found, section = text.partition(f"\n## `distribax {name}`\n")
        assert found, name
        section = section.partition("\n## ")[0]
        options = [o for action in parser._actions for o in action.option_strings]
        missing = [o for o in options if f"`{o}`" not in section and o not in ("-h", "--help")]
        assert not missing, name

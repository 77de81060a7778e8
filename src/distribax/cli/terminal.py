"""What the commands write to: a terminal, or whatever reads their output."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from rich.console import Console
from typing_extensions import override

_FILE_WIDTH: Final = 120


class CommandConsole(Console):
    """Raises if nobody reads the output, for `main` to end the command in order."""

    @override
    def on_broken_pipe(self) -> NoReturn:
        """Raises BrokenPipeError; rich's own way is to end the process with code 1."""
        raise BrokenPipeError


def make_console() -> Console:
    """Returns a console for standard output; in files, lines are wide enough for tables."""
    is_terminal = sys.stdout.isatty()
    return CommandConsole(width=None if is_terminal else _FILE_WIDTH, highlight=is_terminal)

"""How `--help` looks: defaults at the end of each option, and examples as they were written."""

from __future__ import annotations

import argparse
import textwrap
from typing import Final

from typing_extensions import override

from distribax.types import (
    COLLECTIVE_ERROR_EXIT_CODE,
    PEER_LOST_EXIT_CODE,
    RESTARTABLE_EXIT_CODE,
)

USAGE_ERROR: Final = 2
"""The exit code for arguments that are not understood, as argparse has it."""
_WIDTH: Final = 78
BROKEN_PIPE: Final = 141
"""The exit code when nobody reads the output, as shells report SIGPIPE."""

EXIT_CODES: Final = f"""\
exit codes:
  0    all went well
  1    the program, or a check of the doctor, has failed
  2    the arguments are wrong
  {RESTARTABLE_EXIT_CODE}   a worker was told to stop and has saved; it asks to be started again
  {PEER_LOST_EXIT_CODE}   a worker has ended because it lost another one
  {COLLECTIVE_ERROR_EXIT_CODE}   the workers did not make the same calls
  130  stopped by Ctrl-C (128 + 2)
  {BROKEN_PIPE}  the reader of the output has gone (128 + 13)
  143  stopped by SIGTERM (128 + 15)
  n    `run` ends with the exit code of the first worker that failed"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of each option that has one."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        # A default of 0 is shown, although it is equal to False.
        is_plain = action.default in (None, argparse.SUPPRESS, []) or action.default is False
        if is_plain or not action.option_strings or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    *,
    summary: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Returns the parser of a new command, whose help ends with examples.

    Args:
        commands: Where to add it.
        name: The command.
        summary: What it does, for the list of commands.
        description: What it does, for its own help.
        examples: Command lines to try.
    """
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog=f"examples:\n{lines}\n\nexit codes: see distribax --help",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )

"""The command line of `distribax`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from distribax import __version__
from distribax.cli import bench, completion, demo, doctor, run
from distribax.cli.help_format import BROKEN_PIPE, EXIT_CODES, HelpFormatter


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="distribax",
        description="Run a computation across many devices with JAX.",
        epilog=EXIT_CODES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distribax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (demo, run, doctor, bench, completion):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # As in `distribax doctor | head`. Python writes what is left when it ends: to nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code

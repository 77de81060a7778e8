"""The command `distribax demo`."""

from __future__ import annotations

import argparse
import sys

from distribax.cli.demo.demo_programs import PROGRAMS, DemoError
from distribax.cli.demo.view import DemoView
from distribax.cli.help_format import add_command
from distribax.cli.terminal import make_console
from distribax.progress import get_progress, set_progress


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = add_command(
        commands,
        "demo",
        summary="train a classifier of handwritten digits, with any strategy",
        description="Trains a classifier of handwritten digits, and shows loss, accuracy and "
        "examples per second.",
        examples="""
distribax demo
distribax demo --strategy multi-worker
distribax demo --strategy ps --epochs 5
distribax demo --keras""",
    )
    add = parser.add_argument
    add("--strategy", choices=list(PROGRAMS), default="mirrored", help="how to distribute it")
    add(
        "--keras",
        action="store_const",
        const="keras",
        dest="strategy",
        help="the same as --strategy keras",
    )
    add("--devices", type=_parse_positive, default=4, help="virtual CPU devices")
    add("--epochs", type=_parse_positive, default=20, help="passes over the data")
    parser.set_defaults(run=run)


def _parse_positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def run(options: argparse.Namespace) -> int:
    """Trains and tests, with a live view and a table at the end; returns the exit code."""
    program = PROGRAMS[options.strategy]
    view = DemoView(make_console(), f"distribax: handwritten digits, {program.title}")
    before = get_progress()
    # The live view says what goes on; two of them would overwrite each other.
    set_progress("off")
    try:
        with view.show():
            outcome = program.train(options.devices, options.epochs, view.tell)
    except DemoError as error:
        print(f"distribax demo: error: {error}", file=sys.stderr)
        return 1
    finally:
        set_progress(before)
    view.report(outcome, [program.page, "docs/guide/getting_started.md"])
    return 0

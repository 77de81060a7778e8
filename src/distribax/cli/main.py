"""The command line of `distribax`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from distribax.cli import demo, doctor, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="distribax", description="Run a computation across many devices with JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_parser(commands)
    run.add_parser(commands)
    doctor.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)

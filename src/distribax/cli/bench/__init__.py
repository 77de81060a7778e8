"""`distribax bench`: measures this machine, and what distribax costs on it."""

from __future__ import annotations

from distribax.cli.bench.command import add_parser as add_parser

"""`distribax demo`: trains a classifier of handwritten digits with the strategy of your choice."""

from __future__ import annotations

from distribax.cli.demo.command import add_parser as add_parser

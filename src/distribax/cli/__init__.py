"""The `distribax` command."""

from __future__ import annotations

from distribax.cli.main import main as main

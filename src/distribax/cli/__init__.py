"""The `distribax` command."""

from distribax.cli.main import main as main

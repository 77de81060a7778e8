"""Lets `python -m distribax` do what the `distribax` command does."""

import sys

from distribax.cli import main

if __name__ == "__main__":
    sys.exit(main())

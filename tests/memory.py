"""How often test processes look for garbage: seldom, as they make many objects and end soon."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""So many objects are made between two collections; Python's 700 take a twentieth of the time."""


def collect_seldom() -> None:
    """Lets this process and its forks look for garbage less often."""
    gc.set_threshold(_NEW_OBJECTS)


def freeze() -> None:
    """Keeps the garbage collector from looking at modules, tests and compiled programs again.

    A process that has run thousands of tests has millions of objects, which each of its full
    collections would look at.
    """
    gc.collect()
    gc.freeze()

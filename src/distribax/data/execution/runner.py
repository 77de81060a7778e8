"""The way from a plan to its elements.

Grain is imported when the first plan runs, not before: it takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from distribax.data.elements import Element
from distribax.data.plan.node import Node


def _engine() -> ModuleType:
    from distribax.data.execution import engine

    return engine


def start(plan: Node, run: int, base: int, entropy: Mapping[int, int]) -> Any:
    """Starts the `run`-th iteration of a plan; returns a Grain iterator.

    `base` seeds the unseeded shuffles inside users' functions; `entropy` gives the seeds of other
    unseeded shuffles (by the node's id) when a position is restored.
    """
    return _engine().start(plan, run, base, entropy)


def first_element(plan: Node) -> Element | None:
    """Runs a plan up to its first element; None if it has none."""
    return _engine().first_element(plan)

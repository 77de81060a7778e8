"""The way from a plan to its elements.

Grain is imported when the first plan runs, not before: it takes half a second.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from distribax.data.elements import Element
from distribax.data.execution.context import Seeds
from distribax.data.plan.plan_node import Node


def _engine() -> ModuleType:
    from distribax.data.execution import pipeline

    return pipeline


def start(plan: Node, run: int, seeds: Seeds) -> Any:
    """Starts the `run`-th iteration of a plan; returns a Grain iterator."""
    return _engine().start(plan, run, seeds)


def first_element(plan: Node) -> Element | None:
    """Runs a plan up to its first element; None if it has none."""
    return _engine().first_element(plan)

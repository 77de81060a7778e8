"""The way from a plan to its elements.

Grain is imported when the first plan runs, not before: it takes half a second.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from distribax.data.elements import Element
from distribax.data.plan.plan_node import Node
from distribax.data.runtime.pass_context import Seeds

if TYPE_CHECKING:
    from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator


def _load_engine() -> ModuleType:
    from distribax.data.runtime import pipeline

    return pipeline


def start(plan: Node, run: int, seeds: Seeds) -> PipelineIterator:
    """Starts the `run`-th iteration of a plan; returns a Grain iterator."""
    return _load_engine().start(plan, run, seeds)


def read_first_element(plan: Node) -> Element | None:
    """Runs a plan up to its first element; None if it has none."""
    return _load_engine().read_first_element(plan)

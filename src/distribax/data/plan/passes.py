"""Counts the iterations over random steps, so that each iteration has another order."""

from __future__ import annotations

import copy
import itertools
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from distribax.data.plan.plan_node import Node, walk

Worker: TypeAlias = tuple[int, int]
"""How many workers share the data, and which of them this is."""

ALONE: Worker = (1, 0)
"""A process that reads the data for itself."""

_numbers: defaultdict[Worker, itertools.count[int]] = defaultdict(itertools.count)


@dataclass
class Passes:
    """The iterations over one random step, whichever data sets and strategies they belong to.

    They are counted apart for a worker that reads its part and for a process that reads alone:
    workers that must shuffle alike start their common iterations in the same order, while one of
    them may also look at the data by itself.

    Attributes:
        entropy: The seed if the user gives none; drawn once, so that an iterator can be resumed.
        next_pass: The number of the next iteration.
        numbers: Which of the steps that the workers have distributed this one is.
    """

    entropy: int = field(default_factory=lambda: secrets.randbits(63))
    next_pass: dict[Worker, int] = field(default_factory=dict)
    numbers: dict[Worker, int] = field(default_factory=dict)


@runtime_checkable
class RandomStep(Protocol):
    """A step whose elements or their order differ from one iteration to the next."""

    @property
    def passes(self) -> Passes: ...


@runtime_checkable
class SeededStep(RandomStep, Protocol):
    """A random step that draws by itself, and not only in the data sets that it makes."""

    @property
    def seed(self) -> int | None: ...

    @property
    def reshuffle_each_iteration(self) -> bool: ...


def find_random(plan: Node) -> list[RandomStep]:
    """Returns the random steps of a plan, each once, from its end to its sources."""
    found = {id(node): node for node in walk(plan) if isinstance(node, RandomStep)}
    return list(found.values())


def find_unseeded(plan: Node) -> list[SeededStep]:
    """Returns the random steps that were given no seed, each once, in a fixed order."""
    steps = find_random(plan)
    return [step for step in steps if isinstance(step, SeededStep) and step.seed is None]


def start_pass(plan: Node, worker: Worker) -> int:
    """Returns the number of a new iteration: one that none of the random steps has had."""
    number = max((step.passes.next_pass.get(worker, 0) for step in find_random(plan)), default=0)
    continue_after(plan, worker, number)
    return number


def continue_after(plan: Node, worker: Worker, number: int) -> None:
    """Makes the next iteration the one after `number`."""
    for step in find_random(plan):
        step.passes.next_pass[worker] = number + 1


def number_steps(plan: Node, worker: Worker) -> None:
    """Numbers random steps that a worker distributes for the first time.

    All workers distribute their data sets in the same order, so the numbers make seeds that are
    the same on all of them and differ from one data set to the next.
    """
    for step in find_random(plan):
        if worker not in step.passes.numbers:
            step.passes.numbers[worker] = next(_numbers[worker])


def renew_passes(node: Node) -> Node:
    """Returns a step that counts, and draws if it has no seed, independently of this one."""
    if not isinstance(node, RandomStep):
        return node
    renewed = copy.copy(node)
    object.__setattr__(renewed, "passes", Passes())
    return renewed

"""What an iteration depends on: which pass it is, its seeds, and how many threads it may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from distribax.data.plan.passes import RandomStep, SeededStep, find_random, find_unseeded
from distribax.data.plan.pieces import WorkerPart
from distribax.data.plan.plan_node import Node, walk
from distribax.data.runtime.permutation import Key


class IteratorState(dict[str, Any]):
    """A saved position: a dict that JSON can hold and that nobody changes.

    Grain copies the state with every element that it prefetches; each call of
    `get_state` makes a new one, so a copy may be the state itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> IteratorState:
        return self


@dataclass(frozen=True)
class Seeds:
    """The seeds of shuffles that were given none; they stay with an iterator when it is saved.

    `common` is for the shuffles inside users' functions: called again, a function makes another
    data set, which must have the same order.
    """

    common: int = 0
    by_node: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Node) -> Seeds:
        """Returns the seeds of a new iterator: the steps' own, or those all workers agree on."""
        part = next((node for node in walk(plan) if isinstance(node, WorkerPart)), None)

        def choose(step: RandomStep, place: int) -> int:
            if part is None or part.seed is None:
                return step.passes.entropy
            return part.seed + step.passes.numbers.get(part.worker, place)

        seeds = {id(step): choose(step, place) for place, step in enumerate(find_random(plan))}
        common = next(iter(seeds.values()), 0)
        return cls(common, {id(step): seeds[id(step)] for step in find_unseeded(plan)})

    def save(self, plan: Node) -> list[int]:
        """Returns the seeds as a list, in an order that an equal plan has too."""
        return [self.common, *(self.by_node.get(id(n), self.common) for n in find_unseeded(plan))]

    @classmethod
    def load(cls, plan: Node, saved: list[int]) -> Seeds:
        """Returns the seeds of a saved iterator."""
        common, *seeds = saved
        pairs = zip(find_unseeded(plan), seeds, strict=True)
        return cls(common, {id(node): seed for node, seed in pairs})


@dataclass
class Progress:
    """How many elements the sources of a running pipeline have given, in all its threads.

    Between two errors it tells a step that meets other elements from one that is stuck.
    """

    num_given: int = 0


@dataclass(frozen=True)
class PassContext:
    """Identifies a pass over a node, so that randomness follows from it and nothing else.

    `run` counts the iterators of a data set; `path` holds, from the end of the pipeline to its
    beginning, the number of the repetition (or of the outer element) that the pass belongs to.
    """

    run: int = 0
    path: tuple[int, ...] = ()
    threads: int = 1
    # Maps that are to run in parallel do so in this many processes; 0 means in threads.
    processes: int = 0
    seeds: Seeds = field(default_factory=Seeds)
    progress: Progress = field(default_factory=Progress)

    def child(self, number: int) -> PassContext:
        """Returns the context of the `number`-th pass over what lies below."""
        return dataclasses.replace(self, path=(*self.path, number))

    def save(self, plan: Node) -> dict[str, Any]:
        """Returns what the randomness of this pass over `plan` depends on, as JSON-able data."""
        return {"run": self.run, "path": list(self.path), "seeds": self.seeds.save(plan)}

    def load(self, plan: Node, saved: dict[str, Any]) -> PassContext:
        """Returns the context of a saved pass."""
        seeds = Seeds.load(plan, saved["seeds"])
        return dataclasses.replace(self, run=saved["run"], path=tuple(saved["path"]), seeds=seeds)

    def key(self, node: SeededStep) -> Key:
        """Returns what the draws of a random step's pass depend on."""
        seed = node.seed
        if seed is None:
            seed = self.seeds.by_node.get(id(node), self.seeds.common)
        return (seed, self.run, *self.path) if node.reshuffle_each_iteration else (seed,)


BuildIterator: TypeAlias = Callable[[Node, PassContext], Any]
"""Makes the iterator of one pass over a node."""

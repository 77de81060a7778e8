"""What an iteration is told from above: which pass it is, and how many threads it may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distribax.data.execution.permutation import Key
from distribax.data.plan.node import Node, walk
from distribax.data.plan.order import Shuffle


class State(dict[str, Any]):
    """A saved position: a dict that JSON can hold and that nobody changes.

    Grain copies the state with every element that it prefetches; states are made anew each time
    they are asked for, so a copy may be the state itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return self


@dataclass(frozen=True)
class Context:
    """Identifies a pass over a node, so that randomness follows from it and nothing else.

    `run` counts the iterators of a data set; `path` holds, from the end of the pipeline to its
    beginning, the number of the repetition (or of the outer element) that the pass belongs to.
    """

    run: int = 0
    path: tuple[int, ...] = ()
    threads: int = 1
    # Seeds of unseeded shuffles, where a restored iterator brings those of another process.
    entropy: Mapping[int, int] = field(default_factory=dict)
    # A random number that stays with the iterator when it is saved.
    base: int = 0
    # Where set, the seed of shuffles that were given none: workers must shuffle alike, and a
    # function that is called again must make a data set of the same order.
    common_seed: int | None = None

    def child(self, number: int) -> Context:
        """Returns the context of the `number`-th pass over what lies below."""
        return dataclasses.replace(self, path=(*self.path, number))

    def inside_function(self, number: int) -> Context:
        """Returns the context of a data set that a user's function makes of an element."""
        seed = self.base if self.common_seed is None else self.common_seed
        return dataclasses.replace(self.child(number), common_seed=seed)

    def key(self, node: Shuffle) -> Key:
        """Returns what the order of a shuffle's pass depends on."""
        seed = self.seed(node)
        return (seed, self.run, *self.path) if node.reshuffle_each_iteration else (seed,)

    def seed(self, node: Shuffle) -> int:
        """Returns the seed of a shuffle, the user's or the one drawn in its place."""
        if node.seed is not None:
            return node.seed
        if self.common_seed is not None:
            return self.common_seed
        return self.entropy.get(id(node), node.entropy)


def unseeded(node: Node) -> list[Shuffle]:
    """Returns the shuffles of a plan for which the user gave no seed, in a fixed order."""
    return [step for step in walk(node) if isinstance(step, Shuffle) and step.seed is None]

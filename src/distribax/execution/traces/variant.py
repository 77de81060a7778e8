"""Variants of a compiled run: its replicas' code, traced for pieces of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distribax import contracts
from distribax.values.layout import Shape


@dataclass
class Known:
    """What the variants of a run have found out about each other.

    While one variant is traced, the shapes that the others have at the same place are not known. So
    each notes its own, and where they turn out to differ, all are traced again.

    Attributes:
        choices: The index of each replica's variant.
        idle: The replicas whose piece is empty.
        shapes: The shapes that the variants have at each place where they look at each other.
        written: The variables that any of them writes.
    """

    choices: tuple[int, ...]
    idle: frozenset[int]
    shapes: list[list[Shape]] = field(default_factory=list)
    written: dict[contracts.State, None] = field(default_factory=dict)

    def learn(
        self, variants: Sequence[Variant], written: Sequence[Sequence[contracts.State]]
    ) -> bool:
        """Takes in what traces have shown; returns whether that makes other traces of them.

        Args:
            variants: The variants, as they were traced.
            written: What each of those that were traced to their end writes, in its order.
        """
        for states in written:
            self.written.update(dict.fromkeys(states))
        is_new = any(list(states) != list(self.written) for states in written)
        # A trace that has failed may have asked less often than others.
        for place, column in enumerate(zip(*(each.asked for each in variants), strict=False)):
            shapes = list(column)
            is_even = all(shape == shapes[0] for shape in shapes)
            if place >= len(self.shapes):
                self.shapes.append(shapes)
                if not is_even:
                    return True
            elif self.shapes[place] != shapes:
                # What comes after depends on it, and is looked at in the next traces.
                self.shapes[place:] = [shapes]
                return True
        return is_new


class Variant:
    """The replicas' code for pieces of one size, while it is traced.

    Args:
        index: Which variant it is.
        known: What is known about all variants.
    """

    def __init__(self, index: int, known: Known) -> None:
        self.index = index
        self.known = known
        self.asked: list[Shape] = []

    @property
    def replica_id(self) -> int:
        """The index of the first replica that runs it."""
        return self.known.choices.index(self.index)

    @property
    def is_idle(self) -> bool:
        """Whether the replicas that run it have an empty piece."""
        return self.replica_id in self.known.idle

    def find_shapes(self, shape: Shape) -> tuple[Shape, ...] | None:
        """Returns the shapes of a value in all replicas; None if they are the same.

        Args:
            shape: The shape in this variant.
        """
        place = len(self.asked)
        self.asked.append(tuple(shape))
        shapes = self.known.shapes[place] if place < len(self.known.shapes) else [shape]
        if all(each == shapes[0] for each in shapes):
            return None
        return tuple(shapes[choice] for choice in self.known.choices)

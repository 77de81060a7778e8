"""Synchronous updates: contributions are collected, and their mean is applied once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distribax.parameter_server.protocol.operations import Apply, Array, Gradient, Rows


@dataclass
class Round:
    """The contributions of an optimizer that have come in and are not yet applied."""

    number: int = 0
    """How many rounds have been applied before this one."""
    contributions: list[Apply] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    begun: float = 0.0
    known: set[str] = field(default_factory=set)
    """Who has contributed to a round before."""
    incomplete: int = 0
    """How many rounds were applied because somebody had waited too long."""
    late: Counter[str] = field(default_factory=Counter)
    """How often each client was missing then."""

    def add(self, client: str, contribution: Apply) -> None:
        """Adds a contribution; its arrays are copied."""
        if not self.contributions:
            self.begun = time.monotonic()
        gradients = tuple(_copy(gradient) for gradient in contribution.gradients)
        extra = {name: np.array(value) for name, value in contribution.extra_args.items()}
        self.contributions.append(Apply(contribution.optimizer, gradients, extra))
        self.clients.append(client)
        self.known.add(client)

    def close(self) -> None:
        """Begins the next round."""
        self.number += 1
        self.contributions.clear()
        self.clients.clear()

    def note_late(self) -> None:
        """Counts the clients that are missing."""
        self.incomplete += 1
        self.late.update(self.known - set(self.clients))

    def status(self) -> dict[str, Any]:
        """Returns what a user may want to know about the rounds."""
        return {
            "applied": self.number,
            "waiting": list(self.clients),
            "incomplete": self.incomplete,
            "late": dict(self.late),
        }


def average(contributions: Sequence[Apply]) -> Apply:
    """Returns one contribution in place of all: the mean of each gradient.

    One that has no gradient for a target counts as zeros, unless none has one.
    """
    last = contributions[-1]
    columns = zip(*(contribution.gradients for contribution in contributions), strict=True)
    gradients = tuple(_average(column, len(contributions)) for column in columns)
    return Apply(last.optimizer, gradients, last.extra_args)


def _average(column: tuple[Gradient, ...], count: int) -> Gradient:
    given = [gradient for gradient in column if gradient is not None]
    if not given:
        return None
    sparse = [gradient for gradient in given if isinstance(gradient, Rows)]
    dense = [gradient for gradient in given if not isinstance(gradient, Rows)]
    if not dense:
        indices = np.concatenate([np.asarray(part.indices) for part in sparse])
        rows = np.concatenate([np.asarray(part.rows) for part in sparse])
        return Rows(indices, _divide(rows, count))
    total = np.array(dense[0])
    for other in dense[1:]:
        total += np.asarray(other)
    for part in sparse:
        np.add.at(total, part.indices, part.rows)
    return _divide(total, count)


def _divide(total: Array, count: int) -> Array:
    return np.asarray(total / np.asarray(count, total.dtype), total.dtype)


def _copy(gradient: Gradient) -> Gradient:
    if isinstance(gradient, Rows):
        return Rows(np.array(gradient.indices), np.array(gradient.rows))
    return None if gradient is None else np.array(gradient)

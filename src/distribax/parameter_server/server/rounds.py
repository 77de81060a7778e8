"""Synchronous updates: contributions are collected, and their mean is applied once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distribax.parameter_server.protocol.operations import Apply, Array, Gradient, SparseGradient
from distribax.parameter_server.protocol.server_status import RoundStatus
from distribax.parameter_server.server.presence import ABSENCE_SECONDS, Presence


@dataclass
class Round:
    """The contributions of an optimizer that have come in and are not yet applied.

    A round has a *share* for each worker, and all of them are computed with the same parameters: a
    worker begins its share before it reads them. It does not begin a second one before the round is
    applied, unless the worker whose share that is will not do it.
    """

    num_shares: int = 1
    """How many contributions make the round complete."""
    number: int = 0
    """How many rounds have been applied before this one."""
    contributions: list[Apply] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    """Whose contributions they are."""
    shares: list[int] = field(default_factory=list)
    """Which share each of them is."""
    computing: dict[int, str] = field(default_factory=dict)
    """The shares that have been begun, and the clients that compute them."""
    replaced: set[str] = field(default_factory=set)
    """Clients that have begun a share and were lost; another one does the share instead."""
    begun: float = 0.0
    """When the first contribution came."""
    known: set[str] = field(default_factory=set)
    """Who has contributed to a round before."""
    incomplete: int = 0
    """How many rounds were applied because somebody had waited too long."""
    late: Counter[str] = field(default_factory=Counter)
    """How often each client was missing then."""

    @property
    def missing(self) -> list[int]:
        """The shares that have not been contributed."""
        return [share for share in range(self.num_shares) if share not in self.shares]

    def find_share(self, client: str, presence: Presence) -> int | None:
        """Returns the share that a client may compute now, or None if it has to wait."""
        own = presence.get_worker(client)
        for share in self.missing:
            holder = self.computing.get(share)
            if holder == client or (share == own and holder is None):
                return share
        for share in self.missing:
            holder = self.computing.get(share)
            if holder is None:
                if presence.is_inactive(share, self.begun):
                    return share
            elif presence.is_absent(presence.get_worker(holder), self.begun):
                return share
        return None

    def begin(self, share: int, client: str) -> None:
        """Notes that a client computes a share."""
        holder = self.computing.get(share)
        if holder is not None and holder != client:
            self.replaced.add(holder)
        self.replaced.discard(client)
        self.computing[share] = client

    def give_up(self, client: str) -> None:
        """Forgets the shares that a client has begun."""
        self.computing = {share: own for share, own in self.computing.items() if own != client}

    def choose_shares(self, client: str, own: int | None, count: int) -> list[int]:
        """Returns the shares that contributions of a client are.

        Raises:
            RuntimeError: If another client was given the share that this one has computed.
            ValueError: If the round has fewer shares left.
        """
        if client in self.replaced:
            self.replaced.discard(client)
            raise RuntimeError(
                f"worker {own} had no connection for {ABSENCE_SECONDS:g} s, and another one does "
                "its share of a synchronous update. Its gradients, which are too late, were not "
                "used."
            )
        held = [share for share in self.missing if self.computing.get(share) == client]
        free = [share for share in self.missing if share not in self.computing]
        shares = [*held, *sorted(free, key=lambda share: share != own)][:count]
        if len(shares) < count:
            raise ValueError(
                f"{count} gradients for one synchronous update came from {client}, but only "
                f"{len(shares)} of its {self.num_shares} shares are left. Apply gradients once in "
                "each scheduled function, and not in the program that schedules them."
            )
        return shares

    def add(self, client: str, share: int, contribution: Apply) -> None:
        """Adds a contribution; its arrays are copied."""
        if not self.contributions:
            self.begun = time.monotonic()
        gradients = tuple(_copy(gradient) for gradient in contribution.gradients)
        extra = {name: np.array(value) for name, value in contribution.extra_args.items()}
        self.contributions.append(Apply(contribution.optimizer, gradients, extra))
        self.clients.append(client)
        self.shares.append(share)
        self.computing.pop(share, None)
        self.known.add(client)

    def close(self) -> None:
        """Begins the next round."""
        self.number += 1
        self.contributions.clear()
        self.clients.clear()
        self.shares.clear()
        self.computing.clear()

    def note_late(self) -> None:
        """Counts the clients that are missing."""
        self.incomplete += 1
        self.late.update(self.known - set(self.clients))

    def status(self) -> RoundStatus:
        """Returns what a user may want to know about the rounds."""
        return {
            "applied": self.number,
            "contributed": list(self.clients),
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
    sparse = [gradient for gradient in given if isinstance(gradient, SparseGradient)]
    dense = [gradient for gradient in given if not isinstance(gradient, SparseGradient)]
    if not dense:
        indices = np.concatenate([np.asarray(part.indices) for part in sparse])
        rows = np.concatenate([np.asarray(part.rows) for part in sparse])
        return SparseGradient(indices, _divide(rows, count))
    total = np.array(dense[0])
    for other in dense[1:]:
        total += np.asarray(other)
    for part in sparse:
        np.add.at(total, part.indices, part.rows)
    return _divide(total, count)


def _divide(total: Array, count: int) -> Array:
    return np.asarray(total / np.asarray(count, total.dtype), total.dtype)


def _copy(gradient: Gradient) -> Gradient:
    if isinstance(gradient, SparseGradient):
        return SparseGradient(np.array(gradient.indices), np.array(gradient.rows))
    return None if gradient is None else np.array(gradient)

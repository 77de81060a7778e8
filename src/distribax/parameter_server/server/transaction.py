"""The changes of one push, computed beside the store before any of them is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import jax
import numpy as np

from distribax.parameter_server.protocol.operations import (
    Apply,
    Array,
    Assign,
    AssignAdd,
    Op,
    Scatter,
)
from distribax.parameter_server.server.optimizer_update import Update
from distribax.parameter_server.server.rounds import Round, average
from distribax.parameter_server.server.sparse import RowSet, scatter
from distribax.parameter_server.server.stored_parameter import Change, StoredParameter
from distribax.parameter_server.server.tally import OPTIMIZER_UPDATE
from distribax.types import WriteKind

_SCATTERS = {WriteKind.ASSIGN: "scatter_update", WriteKind.ASSIGN_ADD: "scatter_add"}
"""The methods of a variable that write some rows, by the methods that write all of it alike."""


class Transaction:
    """Computes operations one after the other; each sees the changes of those before it.

    Attributes:
        changes: What is to be written, by uid.
        slots: Those of them that only an optimizer reads.
        contributions: What is to be added to rounds.
        closed: The optimizers whose round is applied with it.
        counts: How many changes of each kind there are, "assign_add" for example.
    """

    def __init__(
        self,
        parameter_of: Callable[[str], StoredParameter],
        update_of: Callable[[str], Update],
        round_of: Callable[[str], Round],
    ) -> None:
        self.changes: dict[str, Change] = {}
        self.slots: set[str] = set()
        self.contributions: list[Apply] = []
        self.closed: list[str] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._parameter_of = parameter_of
        self._update_of = update_of
        self._round_of = round_of

    def compute(self, operation: Op) -> None:
        """Computes what an operation changes; it has been checked."""
        match operation:
            case Assign(uid, value):
                self._set(uid, value)
                self.counts["assign"] += 1
            case AssignAdd(uid, delta):
                self._set(uid, self.read_host(uid) + delta)
                self.counts["assign_add"] += 1
            case Scatter(uid, kind, indices, updates):
                value = self.read_host(uid)
                self._set_rows(uid, scatter(value, kind, indices, updates))
                self.counts[_SCATTERS.get(kind, kind.value)] += 1
            case Apply():
                self._contribute(operation)

    def apply_round(self, optimizer: str) -> None:
        """Computes the update of a round with the contributions that are in."""
        self.closed.append(optimizer)
        self._update(average(self._round_of(optimizer).contributions))

    def read(self, uid: str) -> Array | jax.Array:
        """Returns a value as it will be, a NumPy or a JAX array."""
        return self.read_host(uid) if uid in self.changes else self._parameter_of(uid).read()

    def consume(self, uid: str) -> Array | jax.Array:
        """Like `read`, for a program that may overwrite the value if it is a JAX array."""
        return self.read_host(uid) if uid in self.changes else self._parameter_of(uid).consume()

    def read_host(self, uid: str) -> Array:
        """Returns a value as it will be, as a NumPy array."""
        change = self.changes.get(uid)
        if change is None:
            return self._parameter_of(uid).read_host()
        if isinstance(change, RowSet):
            value = self._parameter_of(uid).read_host().copy()
            value[change.indices] = change.rows
            return value
        return np.asarray(change)

    def _contribute(self, contribution: Apply) -> None:
        optimizer = contribution.optimizer
        needed = self._update_of(optimizer).spec.rounds
        if needed > 1:
            if optimizer in self.closed:
                raise ValueError(
                    f"more than the {needed} gradients of a synchronous update came in one push. "
                    "Apply gradients once in each scheduled function."
                )
            self.contributions.append(contribution)
            own = [given for given in self.contributions if given.optimizer == optimizer]
            collected = [*self._round_of(optimizer).contributions, *own]
            if len(collected) < needed:
                return
            self.closed.append(optimizer)
            contribution = average(collected)
        self._update(contribution)

    def _update(self, contribution: Apply) -> None:
        update = self._update_of(contribution.optimizer)
        changes = update(self, contribution.gradients, contribution.extra_args)
        for uid, change in changes.items():
            if isinstance(change, RowSet):
                self._set_rows(uid, change)
            else:
                self._set(uid, change)
        counter = update.spec.counter
        if counter is not None:
            self._set(counter, self.read_host(counter) + 1)
        self.slots.update(changes.keys() & update.slot_uids)
        self.counts[OPTIMIZER_UPDATE] += 1

    def _set(self, uid: str, value: Change) -> None:
        self.changes[uid] = value
        self.slots.discard(uid)

    def _set_rows(self, uid: str, write: RowSet) -> None:
        if uid not in self.changes:
            self._set(uid, write)
            return
        # A second change of the same parameter in one push.
        value = self.read_host(uid).copy()
        value[write.indices] = write.rows
        self._set(uid, value)

"""What a server keeps, and the operations on it: each push wholly or not at all.

A push is checked, then its changes are computed beside the store, and only then are they written.
So a transformation that raises, or an operation that does not fit, leaves nothing half done.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike
from typing_extensions import override

from distribax.errors import DistribaxError
from distribax.parameter_server.protocol.operations import Apply, Array, Op
from distribax.parameter_server.protocol.parameter_spec import OptimizerSpec, ParameterSpec
from distribax.parameter_server.server.optimizer_update import Update
from distribax.parameter_server.server.presence import Presence
from distribax.parameter_server.server.push_checks import (
    check_indices,
    check_operation,
    check_value,
)
from distribax.parameter_server.server.rounds import Round
from distribax.parameter_server.server.stored_parameter import Form, StoredParameter
from distribax.parameter_server.server.tally import Tally
from distribax.parameter_server.server.transaction import Transaction
from distribax.parameter_server.shared_memory.arena import Arena
from distribax.topology.host_memory import copy_aligned, make_aligned

_LOOK_SECONDS: Final = 0.5
"""How often a client that waits for a round looks who is there."""


class UnknownParameterError(DistribaxError, KeyError):
    """The server has nothing with that uid."""

    @override
    def __str__(self) -> str:
        return str(self.args[0])


class PushError(NamedTuple):
    """Why a push could not be applied: the exception's type and message."""

    kind: str
    message: str


@dataclass(frozen=True)
class Answer:
    """The outcome of a client's last push, kept in case the push is sent again."""

    sequence: int
    error: PushError | None = None


class Store:
    """Parameters, optimizers and notes of one server; all methods can be called by any thread."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.lock = threading.RLock()
        self.arena = Arena(shared=shared_memory)
        self.parameters: dict[str, StoredParameter] = {}
        self.updates: dict[str, Update] = {}
        self.rounds: dict[str, Round] = {}
        self.presence = Presence()
        self.notes: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.tally = Tally()
        # Versions never repeat, not even after a restart: callers cache by them.
        self.version = time.time_ns()
        self.structure = 0
        """Grows when something is created."""
        self._rounds_changed = threading.Condition(self.lock)
        self._closed = False

    def create(self, spec: ParameterSpec, value: Array) -> bool:
        """Adds a parameter; returns False if there is one with that uid and the same form."""
        form = Form(spec.name, spec.shape, spec.dtype)
        with self.lock:
            known = self.parameters.get(spec.uid)
            if known is not None:
                if (known.form.shape, known.form.dtype) != (form.shape, form.dtype):
                    raise ValueError(
                        f"Parameter {spec.name!r} (uid {spec.uid!r}) exists with shape "
                        f"{known.form.shape} and dtype {known.form.dtype}; it cannot be created "
                        f"with shape {form.shape} and dtype {form.dtype}."
                    )
                return False
            check_value(form, value)
            self.add(spec.uid, form, value)
            return True

    def register_optimizer(self, spec: OptimizerSpec) -> bool:
        """Adds an optimizer; returns False if there is one with that uid and the same targets."""
        with self.lock:
            known = self.updates.get(spec.uid)
            if known is not None:
                if (known.spec.targets, known.spec.slots) != (spec.targets, spec.slots):
                    raise ValueError(
                        f"Optimizer {spec.uid!r} exists with other targets or slots: use another "
                        "uid."
                    )
                return False
            if spec.counter is not None:
                self._check_counter(spec, self.get_parameter(spec.counter).form)
            targets = [self.get_parameter(uid) for uid in spec.targets]
            update = Update(spec, [parameter.form for parameter in targets])
            slots = {uid: self.parameters[uid].form for uid in spec.slots if uid in self.parameters}
            update.check_slots(slots)
            if len(slots) < len(spec.slots):
                state = update.make_initial_state([parameter.read_host() for parameter in targets])
                for uid, form, leaf in zip(spec.slots, update.slots, state, strict=True):
                    if uid not in slots:
                        self.add(uid, form, leaf)
            self.updates[spec.uid] = update
            self.rounds[spec.uid] = Round(spec.rounds)
            self.structure += 1
            return True

    def pull(self, uids: Sequence[str], have: Sequence[int]) -> tuple[list[int], list[Array]]:
        """Returns the versions, and copies of the values whose version is not the one given."""
        with self.lock:
            parameters = [self.get_parameter(uid) for uid in uids]
            pairs = zip(parameters, have, strict=True)
            changed = [
                copy_aligned(np.asarray(parameter.read()))
                for parameter, version in pairs
                if parameter.version != version
            ]
            return [parameter.version for parameter in parameters], changed

    def take_rows(self, uid: str, indices: Array) -> Array:
        """Returns copies of some rows."""
        with self.lock:
            parameter = self.get_parameter(uid)
            check_indices(parameter.form, indices)
            rows = make_aligned((*indices.shape, *parameter.form.shape[1:]), parameter.form.dtype)
            return np.take(parameter.read_host(), indices, axis=0, out=rows, mode="clip")

    def set_note(self, key: str, value: bytes) -> bytes:
        """Keeps a note unless there is one with that key; returns the one that is kept."""
        with self.lock:
            self.structure += key not in self.notes
            return self.notes.setdefault(key, value)

    def clear(self) -> None:
        """Removes everything, before a client has seen any of it."""
        with self.lock:
            for kept in (self.parameters, self.updates, self.rounds, self.notes, self.answers):
                kept.clear()
            self.arena.close()
            self.arena = Arena(shared=self.arena.shared)

    def push(self, client: str, sequence: int, operations: Sequence[Op]) -> Answer:
        """Applies the operations, unless this or a later push of the client is known."""
        with self.lock:
            known = self.answers.get(client)
            if known is not None and sequence <= known.sequence:
                return known
            try:
                self._perform(client, operations)
                answer = Answer(sequence)
            except Exception as error:  # The client is told what a transformation raises.
                answer = Answer(sequence, error=PushError(type(error).__name__, str(error)))
            self.answers[client] = answer
            return answer

    def complete_rounds(self) -> int:
        """Applies all rounds that have contributions; returns how many they were."""
        with self.lock:
            waiting = [uid for uid, current in self.rounds.items() if current.contributions]
            for uid in waiting:
                self._complete(uid)
            return len(waiting)

    def begin_shares(self, client: str, uids: Iterable[str], seconds: float) -> bool:
        """Waits, but not longer than `seconds`, until a client may compute with some parameters.

        That is at once, unless they are updated in rounds that have its contribution already, and
        those of others are missing. A round that has been incomplete for the optimizer's
        `round_timeout` is applied as it is.
        """
        wanted = frozenset(uids)
        with self.lock:
            deadline = time.monotonic() + seconds
            worker = self.presence.get_worker(client)
            assert worker is not None, f"client {client!r} is no worker"
            while True:
                rounds = {
                    uid: self.rounds[uid]
                    for uid, update in self.updates.items()
                    if update.spec.rounds > 1 and not wanted.isdisjoint(update.spec.targets)
                }
                found = {
                    uid: current.find_share(client, self.presence)
                    for uid, current in rounds.items()
                }
                waiting = [uid for uid, share in found.items() if share is None]
                if not waiting:
                    for uid, share in found.items():
                        assert share is not None
                        rounds[uid].begin(share, client)
                    self.presence.idle.discard(worker)
                    self.presence.waiting.discard(worker)
                    return True
                if worker not in self.presence.waiting:
                    self.presence.waiting.add(worker)
                    self._rounds_changed.notify_all()
                now = time.monotonic()
                if now >= deadline or self._closed:
                    return False
                if not self._complete_due(waiting, now):
                    # Time alone may change who is taken for absent.
                    self._rounds_changed.wait(min(deadline - now, _LOOK_SECONDS))

    def _complete_due(self, optimizers: Iterable[str], now: float) -> bool:
        """Applies the rounds that may be incomplete by now; returns whether there was one."""
        due = [
            uid
            for uid in optimizers
            if (patience := self.updates[uid].spec.round_timeout) is not None
            and now >= self.rounds[uid].begun + patience
        ]
        for uid in due:
            self.rounds[uid].note_late()
            self._complete(uid)
        return bool(due)

    def return_shares(self, client: str) -> None:
        """Forgets what a client has begun and not contributed."""
        with self.lock:
            for current in self.rounds.values():
                current.give_up(client)
            self._rounds_changed.notify_all()

    def watch_rounds(self, idle: Iterable[int]) -> list[dict[str, Any]]:
        """Notes which workers have nothing to do; returns the rounds that are incomplete."""
        with self.lock:
            self.presence.idle = set(idle)
            self._rounds_changed.notify_all()
            now = time.monotonic()
            return [
                {
                    "optimizer": uid,
                    "contributions": len(current.contributions),
                    "num_shares": current.num_shares,
                    "seconds": now - current.begun,
                    "missing": [self._find_worker(current, share) for share in current.missing],
                    "waiting": sorted(self.presence.waiting),
                }
                for uid, current in self.rounds.items()
                if current.contributions
            ]

    def _find_worker(self, current: Round, share: int) -> int:
        """Returns the worker that a share is expected from: its own, or the one that does it."""
        holder = current.computing.get(share)
        worker = None if holder is None else self.presence.get_worker(holder)
        return share if worker is None else worker

    def greet(self, client: str, worker: int) -> None:
        """Notes a connection of a worker; what it had begun as another process is free again."""
        with self.lock:
            for earlier in self.presence.arrive(client, worker):
                for current in self.rounds.values():
                    current.give_up(earlier)
            self._rounds_changed.notify_all()

    def part(self, worker: int) -> None:
        """Notes that a connection of a worker has ended."""
        with self.lock:
            self.presence.leave(worker)

    def close(self) -> None:
        """Ends all waits for rounds, and closes the shared memory."""
        with self.lock:
            self._closed = True
            self._rounds_changed.notify_all()
            self.arena.close()
            self.tally.close()

    def add(self, uid: str, form: Form, value: ArrayLike) -> None:
        """Adds a new parameter."""
        assert uid not in self.parameters
        self.parameters[uid] = StoredParameter(form, self.arena, value, self._next_version())
        self.structure += 1

    def _next_version(self) -> int:
        self.version += 1
        return self.version

    def get_parameter(self, uid: str) -> StoredParameter:
        """Returns a parameter; raises an UnknownParameterError if there is none with that uid."""
        try:
            return self.parameters[uid]
        except KeyError:
            raise UnknownParameterError(f"there is no parameter {uid!r}") from None

    def _get_update(self, uid: str) -> Update:
        try:
            return self.updates[uid]
        except KeyError:
            raise UnknownParameterError(f"there is no optimizer {uid!r}") from None

    def _check_counter(self, spec: OptimizerSpec, form: Form) -> None:
        if form.shape or np.dtype(form.dtype).kind not in "iu":
            raise ValueError(
                f"counter of optimizer {spec.uid!r} is parameter {form.name!r} of shape "
                f"{form.shape} and dtype {form.dtype}; expected a scalar of an integer type."
            )

    def _begin(self) -> Transaction:
        return Transaction(self.get_parameter, self._get_update, self.rounds.__getitem__)

    def _perform(self, client: str, operations: Sequence[Op]) -> None:
        for operation in operations:
            check_operation(operation, lambda uid: self.get_parameter(uid).form, self._get_update)
        transaction = self._begin()
        for operation in operations:
            transaction.compute(operation)
        shares = self._choose_shares(client, transaction.contributions)
        for contribution in transaction.contributions:
            self.rounds[contribution.optimizer].add(
                client, next(shares[contribution.optimizer]), contribution
            )
        if shares:
            # It begins new shares before it reads again.
            for current in self.rounds.values():
                current.give_up(client)
        self._commit(transaction)

    def _choose_shares(
        self, client: str, contributions: Sequence[Apply]
    ) -> dict[str, Iterator[int]]:
        """Returns which shares of their rounds the contributions of a push are, by optimizer."""
        own = self.presence.get_worker(client)
        counts = Counter(contribution.optimizer for contribution in contributions)
        return {
            uid: iter(self.rounds[uid].choose_shares(client, own, count))
            for uid, count in counts.items()
        }

    def _commit(self, transaction: Transaction) -> None:
        version = self._next_version()
        with self.arena:
            for uid, change in transaction.changes.items():
                if uid in transaction.slots and isinstance(change, jax.Array):
                    self.get_parameter(uid).keep(change, version)
                else:
                    self.get_parameter(uid).write(change, version)
        self.tally.add(transaction.counts)
        for uid in transaction.closed:
            self.rounds[uid].close()
        if transaction.closed:
            self._rounds_changed.notify_all()

    def _complete(self, optimizer: str) -> None:
        transaction = self._begin()
        try:
            transaction.apply_round(optimizer)
        finally:
            # Also when the transformation raises: nobody may wait for ever.
            self._commit(transaction)

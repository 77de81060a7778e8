"""What a snapshot holds of a store: taken from the store, and restored into one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distribax.parameter_server.protocol.operations import Apply, Array, decode, encode
from distribax.parameter_server.protocol.parameter_spec import OptimizerSpec
from distribax.parameter_server.server.rounds import Round
from distribax.parameter_server.server.store import PushError, PushOutcome, Store
from distribax.parameter_server.server.stored_parameter import ParameterForm
from distribax.parameter_server.snapshots.snapshot_file import SnapshotState


def take(store: Store) -> SnapshotState:
    """Returns a copy of everything in the store, as of one moment."""
    arrays: list[Array] = []

    def place(value: ArrayLike | bytes) -> int:
        """Keeps a copy of a value; the JSON refers to it by position."""
        given = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        arrays.append(np.array(given))
        return len(arrays) - 1

    with store.lock:
        header = {
            "version": store.version,
            "counts": dict(store.tally.counts),
            "entries": {
                uid: [dataclasses.asdict(parameter.form), place(parameter.read())]
                for uid, parameter in store.parameters.items()
            },
            "optimizers": [
                _describe_optimizer(update.spec, place) for update in store.updates.values()
            ],
            "rounds": {
                uid: _describe_round(current, place) for uid, current in store.rounds.items()
            },
            "notes": {key: place(value) for key, value in store.notes.items()},
            "answers": {
                client: [outcome.sequence, outcome.error]
                for client, outcome in store.outcomes.items()
            },
        }
    return SnapshotState(header, arrays)


def restore(store: Store, state: SnapshotState) -> None:
    """Fills an empty store; if that fails, the store is empty again."""
    with store.lock:
        try:
            _fill(store, state.header, state.arrays)
        except BaseException:
            store.clear()
            raise


def _fill(store: Store, header: dict[str, Any], arrays: Sequence[Array]) -> None:
    store.version = max(store.version, header["version"] + 1)
    for uid, (form, at) in header["entries"].items():
        store.add(uid, ParameterForm(**{**form, "shape": tuple(form["shape"])}), arrays[at])
    for fields, at in header["optimizers"]:
        fields |= {name: tuple(fields[name]) for name in ("targets", "slots")}
        store.register_optimizer(OptimizerSpec(transformation=arrays[at].tobytes(), **fields))
    for uid, described in header["rounds"].items():
        _restore_round(store.rounds[uid], described, arrays)
    store.notes.update({key: arrays[at].tobytes() for key, at in header["notes"].items()})
    for client, (sequence, error) in header["answers"].items():
        store.outcomes[client] = PushOutcome(sequence, error=error and PushError(*error))
    store.tally.counts = Counter(header.get("counts", {}))


def _describe_optimizer(spec: OptimizerSpec, place: Callable[[bytes], int]) -> list[Any]:
    fields = dataclasses.asdict(spec)
    return [fields, place(fields.pop("transformation"))]


def _describe_round(current: Round, place: Callable[[Array], int]) -> dict[str, Any]:
    operations, contained = encode(current.contributions)
    return {
        "number": current.number,
        "clients": list(current.clients),
        "shares": list(current.shares),
        "contributions": operations,
        "arrays": [place(array) for array in contained],
    }


def _restore_round(current: Round, described: dict[str, Any], arrays: Sequence[Array]) -> None:
    current.number = described["number"]
    contained = [arrays[at] for at in described["arrays"]]
    contributions = decode(described["contributions"], contained)
    givers = zip(described["clients"], described["shares"], strict=True)
    for (client, share), contribution in zip(givers, contributions, strict=True):
        assert isinstance(contribution, Apply)
        current.add(client, share, contribution)

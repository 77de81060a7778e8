"""What a snapshot holds of a store: taken from the store, and restored into one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distribax.parameter_server.protocol.operations import Apply, Array, decode, encode
from distribax.parameter_server.protocol.parameter_spec import OptimizerSpec
from distribax.parameter_server.server.rounds import Round
from distribax.parameter_server.server.store import Answer, PushError, Store
from distribax.parameter_server.server.stored_parameter import Form
from distribax.parameter_server.snapshots.snapshot_file import SnapshotState


class _Arrays:
    """Collects arrays, to which the JSON refers by position."""

    def __init__(self) -> None:
        self.all: list[Array] = []

    def place(self, array: ArrayLike) -> int:
        self.all.append(np.array(array))
        return len(self.all) - 1

    def place_bytes(self, value: bytes) -> int:
        return self.place(np.frombuffer(value, np.uint8))


def take(store: Store) -> SnapshotState:
    """Returns a copy of everything in the store, as of one moment."""
    arrays = _Arrays()
    with store.lock:
        header = {
            "version": store.version,
            "counts": dict(store.tally.counts),
            "entries": {
                uid: [dataclasses.asdict(parameter.form), arrays.place(parameter.read())]
                for uid, parameter in store.parameters.items()
            },
            "optimizers": [
                _describe_optimizer(update.spec, arrays) for update in store.updates.values()
            ],
            "rounds": {
                uid: _describe_round(current, arrays) for uid, current in store.rounds.items()
            },
            "notes": {key: arrays.place_bytes(value) for key, value in store.notes.items()},
            "answers": {
                client: [answer.sequence, answer.error] for client, answer in store.answers.items()
            },
        }
    return SnapshotState(header, arrays.all)


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
        store.add(uid, Form(**{**form, "shape": tuple(form["shape"])}), arrays[at])
    for fields, at in header["optimizers"]:
        fields |= {name: tuple(fields[name]) for name in ("targets", "slots")}
        store.register_optimizer(OptimizerSpec(transformation=arrays[at].tobytes(), **fields))
    for uid, described in header["rounds"].items():
        _restore_round(store.rounds[uid], described, arrays)
    store.notes.update({key: arrays[at].tobytes() for key, at in header["notes"].items()})
    for client, (sequence, error) in header["answers"].items():
        store.answers[client] = Answer(sequence, error=error and PushError(*error))
    store.tally.counts = Counter(header.get("counts", {}))


def _describe_optimizer(spec: OptimizerSpec, arrays: _Arrays) -> list[Any]:
    fields = dataclasses.asdict(spec)
    return [fields, arrays.place_bytes(fields.pop("transformation"))]


def _describe_round(current: Round, arrays: _Arrays) -> dict[str, Any]:
    operations, contained = encode(current.contributions)
    return {
        "number": current.number,
        "clients": list(current.clients),
        "shares": list(current.shares),
        "contributions": operations,
        "arrays": [arrays.place(array) for array in contained],
    }


def _restore_round(current: Round, described: dict[str, Any], arrays: Sequence[Array]) -> None:
    current.number = described["number"]
    contained = [arrays[at] for at in described["arrays"]]
    contributions = decode(described["contributions"], contained)
    givers = zip(described["clients"], described["shares"], strict=True)
    for (client, share), contribution in zip(givers, contributions, strict=True):
        assert isinstance(contribution, Apply)
        current.add(client, share, contribution)

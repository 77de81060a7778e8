"""The positions of iterators in a checkpoint: read, chosen for a worker, and restored together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distribax.cluster.peers.worker_agreement import WorkerAgreement
from distribax.training.checkpoints.tracked import Positioned


def move_iterators(
    workers: WorkerAgreement, iterators: Mapping[str, Positioned], positions: Mapping[str, Any]
) -> None:
    """Moves all iterators, or none if one of them, in any worker, does not take its position."""
    before: dict[str, Any] = {}

    def move() -> None:
        for name, iterator in iterators.items():
            here = iterator.get_state()
            iterator.set_state(positions[name])
            before[name] = here

    try:
        workers.run_together("Checkpoint.restore", move)
    except Exception:
        for name, position in before.items():
            iterators[name].set_state(position)
        raise


def read_position(name: str, iterator: Positioned) -> Any:
    """Returns the position of an iterator, which must be data that JSON can hold."""
    position = iterator.get_state()
    try:
        json.dumps(position)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Checkpoint.save: the position of {name!r}, {position!r}, is not data that JSON can "
            f"hold ({error}). Expected get_state() to return numbers, strings, lists and dicts."
        ) from error
    return position


def select_position(name: str, said: Sequence[Any], workers: WorkerAgreement) -> Any:
    """Returns this worker's position of those that the workers had when they saved."""
    if len(said) == workers.num_workers:
        return said[workers.worker_id]
    # That of all workers together is good for any number; a distributed iterator refuses others.
    first = said[0]
    if all(position == first for position in said) or (
        isinstance(first, dict) and "shard" in first
    ):
        return first
    raise ValueError(
        f"Checkpoint.restore: the iterator {name!r} was saved by {len(said)} workers, each at a "
        f"place of its own, and now there are {workers.num_workers}. Restore it with as many "
        "workers, or save an iterator of strategy.experimental_distribute_dataset with "
        "AutoShardPolicy.DATA, which fits any number."
    )

"""`dx.Checkpoint`: saves variables, optimizers, metrics and iterators with Orbax."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from distribax import context
from distribax.cluster.peers.worker_agreement import WorkerAgreement
from distribax.topology import InputTarget
from distribax.training import checkpoint_files as files
from distribax.training.gradients import AnyVariable
from distribax.types import VariableAggregation
from distribax.variables import ShardedVariable, Variable

_VERSION = 1


@runtime_checkable
class Positioned(Protocol):
    """Anything with a position that can be saved: an iterator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@runtime_checkable
class Feeding(Protocol):
    """An iterator that knows whom it feeds, and so which workers move it together."""

    @property
    def input_target(self) -> InputTarget: ...


@runtime_checkable
class Stateful(Protocol):
    """Anything that keeps its state in variables: an optimizer, a metric."""

    @property
    def variables(self) -> Any: ...


class Checkpoint:
    """Saves and restores named objects; one format for every strategy.

    What was saved under one strategy can be restored under another, with any number of replicas: a
    variable is saved as its one value, a value that each replica keeps for itself as the combined
    one. Saving is atomic: a crash leaves the last complete checkpoint. With several workers all
    of them call `save` and `restore`; nobody asks who is the chief.

    Args:
        objects: Variables, optimizers, metrics, iterators, and lists, tuples or dicts of them,
            each under a name of its own.

    Raises:
        ValueError: There is nothing to save.
        TypeError: An object cannot be saved.

    Example:
        >>> import tempfile, distribax as dx
        >>> v = dx.Variable(1.0)
        >>> checkpoint = dx.Checkpoint(v=v)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/first")
        >>> _ = v.assign(5.0)
        >>> checkpoint.restore(path)
        >>> float(v)
        1.0
    """

    def __init__(self, **objects: object) -> None:
        if not objects:
            raise ValueError(
                "dx.Checkpoint: nothing to save. Name what belongs to it: "
                "dx.Checkpoint(model=variables, optimizer=optimizer)."
            )
        self._objects = objects
        # What helpers of the library save along; a checkpoint may have them or not.
        self.notes: dict[str, Positioned] = {}
        self._find_objects()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        timeout_seconds: float = 600.0,
    ) -> str:
        """Writes a checkpoint to a new directory.

        With several workers all call it, with the same path; one of them writes, and all raise if
        it fails or a worker does not come in time.

        Args:
            path: The directory, which must not exist yet.
            overwrite: Replace the checkpoint that is there.
            timeout_seconds: How long to wait for the other workers.

        Returns:
            The absolute path.

        Raises:
            ValueError: `path` exists already, or the workers do not save the same.
            RuntimeError: It is called inside a replica, or a worker failed or is missing.
        """
        _require_outside_replicas("save")
        workers = self.workers(timeout_seconds)
        target = Path(path).absolute()
        variables, iterators = self._find_objects()

        def check() -> None:
            if workers.is_first and target.exists() and not overwrite:
                raise ValueError(
                    f"Checkpoint.save: path={str(path)!r} exists already. Choose a new name (for "
                    "example one with the step), or pass overwrite=True."
                )

        workers.require_same(
            "Checkpoint.save", [os.fspath(path), sorted(variables), sorted(iterators)]
        )
        workers.run_together("Checkpoint.save", check)
        # Every worker reads: to combine what replicas keep for themselves, all are needed.
        values = {name: _read_combined(variable) for name, variable in variables.items()}
        own = workers.run_together(
            "Checkpoint.save",
            lambda: {name: _position(name, each) for name, each in iterators.items()},
        )
        said = workers.exchange("positions", own)
        notes = {
            "version": _VERSION,
            "positions": {name: [positions[name] for positions in said] for name in iterators},
            "library": {name: note.get_state() for name, note in self.notes.items()},
        }

        def write() -> None:
            if workers.is_first:
                files.write(target, values, notes, overwrite)

        workers.run_together("Checkpoint.save", write)
        return str(target)

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        partial: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Reads a checkpoint; everything is checked before anything is changed.

        With several workers all call it, and each must be able to read `path`.

        Args:
            path: What `save` returned.
            partial: Whether the checkpoint may hold more than this object names, such as a data
                iterator that an evaluation does not need.
            timeout_seconds: How long to wait for the other workers.

        Raises:
            ValueError: There is no complete checkpoint at `path`, or it does not fit.
            RuntimeError: It is called inside a replica, or a worker failed or is missing.
        """
        _require_outside_replicas("restore")
        workers = self.workers(timeout_seconds)
        variables, iterators = self._find_objects()

        def check() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
            values, notes = files.read(Path(path).absolute())
            _check_version(notes.get("version"), path)
            _check_names("variables", variables, values, path, partial)
            _check_names("iterators", iterators, notes["positions"], path, partial)
            _check_shapes(variables, values)
            own = {
                name: _select_position(name, notes["positions"][name], workers)
                for name in iterators
            }
            return values, own, notes["library"]

        values, positions, library = workers.run_together("Checkpoint.restore", check)
        _move(workers, iterators, positions)
        for name, variable in variables.items():
            _assign(variable, np.asarray(values[name]).astype(variable.dtype), workers)
        for name in self.notes.keys() & library.keys():
            self.notes[name].set_state(library[name])

    def workers(self, timeout_seconds: float = 600.0) -> WorkerAgreement:
        """Returns the workers that save and restore this together.

        Args:
            timeout_seconds: How long they wait for each other.

        Returns:
            The way to agree with them.
        """
        variables, iterators = self._find_objects()
        strategies = {id(v.distribute_strategy): v.distribute_strategy for v in variables.values()}
        targets = [context.get_strategy().extended.input_target()]
        targets += [strategy.extended.input_target() for strategy in strategies.values()]
        targets += [each.input_target for each in iterators.values() if isinstance(each, Feeding)]
        return WorkerAgreement.of_targets("checkpoint", targets, timeout_seconds)

    def _find_objects(self) -> tuple[dict[str, AnyVariable], dict[str, Positioned]]:
        """Returns all variables and iterators by their path."""
        variables: dict[str, AnyVariable] = {}
        iterators: dict[str, Positioned] = {}

        def visit(name: str, value: object) -> None:
            if isinstance(value, (Variable, ShardedVariable)):
                variables[name] = value
            elif isinstance(value, Positioned):
                iterators[name] = value
            elif isinstance(value, Mapping):
                for key, item in value.items():
                    visit(f"{name}.{key}", item)
            elif isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    visit(f"{name}.{index}", item)
            elif isinstance(value, Stateful):
                visit(name, list(value.variables))
            else:
                raise TypeError(
                    f"dx.Checkpoint: {name}={value!r} cannot be saved. Expected a dx.Variable, an "
                    "iterator, something with `variables` (an optimizer, a metric), or a list, "
                    "tuple or dict of them."
                )

        for name, value in self._objects.items():
            visit(name, value)
        return variables, iterators


def _read_combined(variable: AnyVariable) -> np.ndarray:
    is_combined = variable.aggregation is not VariableAggregation.NONE
    if isinstance(variable, Variable) and variable.per_replica and not is_combined:
        return variable.values[0].numpy()
    return variable.numpy()


def _assign(variable: AnyVariable, value: np.ndarray, workers: WorkerAgreement) -> None:
    is_sum = variable.per_replica and variable.aggregation is VariableAggregation.SUM
    if not (isinstance(variable, Variable) and is_sum):
        variable.assign(value)
        return
    # The first replica gets the whole sum: parts of it would lose what does not divide evenly.
    stored = variable.share()
    new = [np.zeros_like(value) for _ in variable.placement.pieces(stored)]
    if workers.is_first:
        new[0] = value
    variable.store(variable.placement.join([jnp.asarray(piece) for piece in new], stored))


def _move(
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


def _position(name: str, iterator: Positioned) -> Any:
    position = iterator.get_state()
    try:
        json.dumps(position)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Checkpoint.save: the position of {name!r}, {position!r}, is not data that JSON can "
            f"hold ({error}). Expected get_state() to return numbers, strings, lists and dicts."
        ) from error
    return position


def _select_position(name: str, said: Sequence[Any], workers: WorkerAgreement) -> Any:
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


def _check_version(version: object, path: str | os.PathLike[str]) -> None:
    if version != _VERSION:
        raise ValueError(
            f"Checkpoint.restore: path={str(path)!r} has format version {version!r}, but this "
            f"version of distribax reads {_VERSION}. Use the one it was saved with."
        )


def _check_shapes(variables: Mapping[str, AnyVariable], values: Mapping[str, Any]) -> None:
    for name, variable in variables.items():
        shape = tuple(values[name].shape)
        if shape != variable.shape:
            raise ValueError(
                f"Checkpoint.restore: {name!r} was saved with shape {shape}, but "
                f"{variable.described} has another. Build the model as it was when it was saved."
            )


def _check_names(
    what: str,
    wanted: Mapping[str, Any],
    saved: Mapping[str, Any],
    path: str | os.PathLike[str],
    partial: bool,
) -> None:
    missing, strange = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or (strange and not partial):
        raise ValueError(
            f"Checkpoint.restore: the {what} of path={str(path)!r} are not those of this "
            f"Checkpoint. Not in the file: {missing}; only in the file: {strange}. Name the same "
            "objects as when it was saved (an optimizer has variables only once it is built: call "
            "optimizer.build(variables) first); partial=True lets the file have more."
        )


def _require_outside_replicas(what: str) -> None:
    replica = context.get_replica_context()
    if replica is not None and context.has_strategy():
        raise RuntimeError(
            f"Checkpoint.{what}: called inside a replica. Call it outside strategy.run()."
        )

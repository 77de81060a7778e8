"""`dx.Checkpoint`: saves variables, models, optimizers, metrics and iterators with Orbax."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from distribax import context, progress
from distribax.cluster.peers.worker_agreement import WorkerAgreement
from distribax.errors import DamagedCheckpointError
from distribax.execution import adapters
from distribax.training.checkpoints import checkpoint_files as files
from distribax.training.checkpoints.iterator_positions import (
    move_iterators,
    read_position,
    select_position,
)
from distribax.training.checkpoints.late_restore import LateRestore
from distribax.training.checkpoints.restore_status import NothingRestored, RestoreStatus
from distribax.training.checkpoints.save_counter import SaveCounter
from distribax.training.checkpoints.tracked import (
    Feeding,
    Positioned,
    Slot,
    Tracked,
    find_tracked,
)
from distribax.variables.context_rules import can_become

_logger = logging.getLogger(__name__)

_COUNTER = "save_counter"


class Checkpoint:
    """Saves and restores named objects; one format for every strategy.

    What was saved under one strategy can be restored under another, with any number of replicas: a
    variable is saved as its one value, a value that each replica keeps for itself as the combined
    one. Saving is atomic: a crash leaves the last complete checkpoint. With several workers all
    of them call `save` and `restore`; nobody asks who is the chief.

    Args:
        root: An object whose parts are saved under their own names: a model, an optimizer, a dict,
            or any other object, by its attributes.
        **objects: What else is saved, each under a name of its own: variables, arrays, numbers,
            iterators, optimizers, metrics, models, objects with these as attributes, and lists,
            tuples and dicts of them. They are attributes of the checkpoint, and more can be added:
            `checkpoint.model = model`.

    Raises:
        TypeError: An object cannot be saved.

    Example:
        >>> import tempfile, distribax as dx
        >>> v = dx.Variable(1.0)
        >>> checkpoint = dx.Checkpoint(v=v)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
        >>> path.rsplit("/")[-1]
        'ckpt-1'
        >>> _ = v.assign(5.0)
        >>> _ = checkpoint.restore(path).assert_consumed()
        >>> float(v)
        1.0
    """

    def __init__(self, root: object = None, **objects: object) -> None:
        self._root = root
        self._objects: dict[str, Any] = {}
        self._counter = SaveCounter()
        # What helpers of the library save along; a checkpoint may have them or not.
        self._notes: dict[str, Positioned] = {}
        # Restored values whose variables do not exist yet.
        self._late = self._wait({}, True)
        for name, value in objects.items():
            setattr(self, name, value)
        self.find_tracked()

    @property
    def save_counter(self) -> SaveCounter:
        """How often `save` was called, before a restart too."""
        return self._counter

    @property
    def notes(self) -> dict[str, Positioned]:
        """What helpers of the library save along."""
        return self._notes

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._objects:
            return self._objects[name]
        raise AttributeError(
            f"dx.Checkpoint has no {name!r}. It saves: {', '.join(self._objects) or 'nothing'}."
            if not name.startswith("_")
            else name
        )

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif hasattr(type(self), name):
            raise ValueError(
                f"dx.Checkpoint: {name!r} is a name of the checkpoint itself. Choose another one "
                f"for what is saved, such as {name}_=..."
            )
        else:
            self._objects[name] = value

    # Saving.

    def save(
        self,
        file_prefix: str | os.PathLike[str],
        options: object = None,
        *,
        timeout_seconds: float = 600.0,
    ) -> str:
        """Writes a checkpoint to a new directory, numbered by `save_counter`: `prefix-1` and so on.

        With several workers all call it; one of those with the same prefix writes, and all raise if
        it fails or a worker does not come in time.

        Args:
            file_prefix: What the path begins with.
            options: Accepted as in TensorFlow; it changes nothing.
            timeout_seconds: How long to wait for the other workers.

        Returns:
            The absolute path, with the number.

        Raises:
            ValueError: The workers do not save the same.
            RuntimeError: It is called inside a replica, or a worker failed or is missing.
        """
        number = self._counter.value + 1
        path = Path(os.fspath(file_prefix) + f"-{number}")
        return self.write_numbered(path, number, timeout_seconds=timeout_seconds)

    def write_numbered(
        self,
        path: str | os.PathLike[str],
        number: int,
        *,
        timeout_seconds: float = 600.0,
    ) -> str:
        """Writes a checkpoint that counts as the one with a number; one that is there is replaced.

        Args:
            path: The directory.
            number: What `save_counter` is from now on.
            timeout_seconds: How long to wait for the other workers.

        Returns:
            The absolute path.
        """
        before, self._counter.value = self._counter.value, number
        try:
            with progress.show(f"saving {os.fspath(path)}"):
                return self._write(path, True, timeout_seconds)
        except BaseException:
            self._counter.value = before
            raise

    def write(
        self,
        file_prefix: str | os.PathLike[str],
        options: object = None,
        *,
        overwrite: bool = False,
        timeout_seconds: float = 600.0,
    ) -> str:
        """Writes a checkpoint to the given directory, without a number.

        Args:
            file_prefix: The directory, which must not exist yet.
            options: Accepted as in TensorFlow; it changes nothing.
            overwrite: Whether to replace the checkpoint that is there.
            timeout_seconds: How long to wait for the other workers.

        Returns:
            The absolute path.

        Raises:
            ValueError: The path exists already, or the workers do not save the same.
            RuntimeError: It is called inside a replica, or a worker failed or is missing.
        """
        with progress.show(f"saving {os.fspath(file_prefix)}"):
            return self._write(file_prefix, overwrite, timeout_seconds)

    def _write(self, path: str | os.PathLike[str], overwrite: bool, timeout_seconds: float) -> str:
        _require_outside_replicas("save")
        tracked = self.find_tracked()
        workers = _find_workers(tracked, timeout_seconds)
        target = Path(path).absolute()
        writes = is_writer(workers, target)

        def check() -> None:
            if not tracked.slots and not tracked.iterators and not self._notes:
                raise ValueError(
                    "Checkpoint.save: nothing to save. Name what belongs to it: "
                    "dx.Checkpoint(model=variables, optimizer=optimizer)."
                )
            if writes and target.exists() and not overwrite:
                raise ValueError(
                    f"Checkpoint.write: path={str(path)!r} exists already. Choose a new name (for "
                    "example one with the step), or pass overwrite=True."
                )

        workers.require_same("Checkpoint.save", [sorted(tracked.slots), sorted(tracked.iterators)])
        workers.run_together("Checkpoint.save", check)
        # Every worker reads: to combine what replicas keep for themselves, all are needed.
        values = {name: slot.read() for name, slot in tracked.slots.items()}
        values.setdefault(_COUNTER, np.asarray(self._counter.value))
        own = workers.run_together(
            "Checkpoint.save",
            lambda: {name: read_position(name, each) for name, each in tracked.iterators.items()},
        )
        said = workers.exchange("positions", own)
        notes = {
            "positions": {
                name: [positions[name] for positions in said] for name in tracked.iterators
            },
            "library": {name: note.get_state() for name, note in self._notes.items()},
        }

        def write() -> None:
            if writes:
                order = files.find_last_order(target.parent) + 1
                files.write(target, values, {**notes, "order": order}, overwrite)

        workers.run_together("Checkpoint.save", write)
        return str(target)

    def sync(self) -> None:
        """Returns at once, for programs written for TensorFlow: `save` and `restore` wait."""

    # Restoring.

    def restore(
        self,
        save_path: str | os.PathLike[str] | None,
        options: object = None,
        *,
        partial: bool = False,
        timeout_seconds: float = 600.0,
    ) -> RestoreStatus:
        """Reads a checkpoint; everything is checked before anything is changed.

        Values of variables that are not created yet are given to them when they are; what the
        checkpoint does not have stays as it is. The status tells, and checks, what has matched.
        With several workers all call it, and each must be able to read the path.

        Args:
            save_path: What `save` returned, or None, which restores nothing: so that
                `restore(manager.latest_checkpoint)` can stand at the beginning of a program.
            options: Accepted as in TensorFlow; it changes nothing.
            partial: Whether to ignore what the checkpoint has beyond what exists now, like
                `expect_partial()` of the status.
            timeout_seconds: How long to wait for the other workers.

        Returns:
            The status, with `assert_consumed()` and the like.

        Raises:
            ValueError: There is no complete checkpoint at the path, or a shape does not fit.
            RuntimeError: It is called inside a replica, or a worker failed or is missing.
        """
        _require_outside_replicas("restore")
        if save_path is None:
            return NothingRestored()
        with progress.show(f"restoring {os.fspath(save_path)}"):
            status, counter = self._read(save_path, timeout_seconds)
        if counter is not None:
            self._counter.value = counter
        return status.expect_partial() if partial else status

    def read(
        self,
        save_path: str | os.PathLike[str],
        options: object = None,
        *,
        timeout_seconds: float = 600.0,
    ) -> RestoreStatus:
        """Reads a checkpoint that `write` has written; `save_counter` stays as it is.

        Args:
            save_path: What `write` or `save` returned.
            options: Accepted as in TensorFlow; it changes nothing.
            timeout_seconds: How long to wait for the other workers.

        Returns:
            The status, as that of `restore`.

        Raises:
            ValueError: There is no complete checkpoint at the path, or a shape does not fit.
            RuntimeError: It is called inside a replica, or a worker failed or is missing.
        """
        _require_outside_replicas("restore")
        with progress.show(f"restoring {os.fspath(save_path)}"):
            return self._read(save_path, timeout_seconds)[0]

    def _read(
        self, path: str | os.PathLike[str], timeout_seconds: float
    ) -> tuple[RestoreStatus, int | None]:
        tracked = self.find_tracked()
        workers = _find_workers(tracked, timeout_seconds)
        values, notes = _read_together(workers, Path(path).absolute())

        def check() -> tuple[dict[str, Any], dict[str, Any]]:
            _check_forms(tracked.slots, values)
            own = {
                name: select_position(name, notes["positions"][name], workers)
                for name in tracked.iterators
                if name in notes["positions"]
            }
            return own, notes["library"]

        positions, library = workers.run_together("Checkpoint.restore", check)
        counter = None
        if _COUNTER in values and _COUNTER not in tracked.slots:
            counter = int(values.pop(_COUNTER))
        here = {*tracked.slots, *tracked.iterators}
        move_iterators(workers, {name: tracked.iterators[name] for name in positions}, positions)
        matched = tracked.slots.keys() & values.keys()
        for name in sorted(matched):
            tracked.slots[name].write(np.asarray(values[name]), workers.is_first)
        for name in self._notes.keys() & library.keys():
            self._notes[name].set_state(library[name])
        self._late.forget()
        late = {name: values[name] for name in values.keys() - matched}
        self._late = self._wait(late, workers.is_first)
        missing = sorted(here - matched - positions.keys())
        if missing:
            _logger.warning(
                "Checkpoint.restore: %s has no values for %s, which stay as they are. "
                "restore(...).assert_consumed() makes this an error.",
                path,
                missing[:8],
            )
        return self._make_status({*matched, *positions}, os.fspath(path)), counter

    def _make_status(self, matched: set[str], path: str) -> RestoreStatus:
        """Returns the status of a restore that has matched these names at once."""
        late, waited_for = self._late, set(self._late.values)

        def match() -> tuple[list[str], list[str]]:
            if late.values:
                late.give_late_values()
            tracked = self.find_tracked()
            given = matched | (waited_for - late.values.keys())
            return sorted(late.values), sorted({*tracked.slots, *tracked.iterators} - given)

        return RestoreStatus(match, late.forget, len(matched), path)

    def _wait(self, values: Mapping[str, Any], is_first_worker: bool) -> LateRestore:
        """Keeps values for variables that are created later, in the place of earlier ones."""
        arrays = {name: np.asarray(value) for name, value in values.items()}
        return LateRestore(self, self._objects, self._root, arrays, is_first_worker, _check_forms)

    def workers(self, timeout_seconds: float = 600.0) -> WorkerAgreement:
        """Returns the workers that save and restore this together.

        Args:
            timeout_seconds: How long they wait for each other.

        Returns:
            The way to agree with them.
        """
        return _find_workers(self.find_tracked(), timeout_seconds)

    def find_tracked(self) -> Tracked:
        """Returns all that is saved, by its path."""
        adapters.load_adapters()
        return find_tracked(self._objects, self._objects.__setitem__, self._root)


def is_writer(workers: WorkerAgreement, path: Path) -> bool:
    """Returns whether this worker writes to a path: the first one of those that name it.

    Programs written for TensorFlow let the chief write, and the others somewhere else.
    """
    said = workers.exchange("path", str(path))
    return said.index(str(path)) == workers.worker_id


def _read_together(workers: WorkerAgreement, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a checkpoint holds; if one worker finds it damaged, all raise that."""

    def read() -> tuple[dict[str, Any], dict[str, Any]] | DamagedCheckpointError:
        try:
            return files.read(path)
        except DamagedCheckpointError as error:
            return error

    found = workers.run_together("Checkpoint.restore", read)
    damage = str(found) if isinstance(found, DamagedCheckpointError) else None
    for said in workers.exchange("damage", damage):
        if said is not None:
            raise DamagedCheckpointError(said)
    assert not isinstance(found, DamagedCheckpointError)
    return found


def _find_workers(tracked: Tracked, timeout_seconds: float) -> WorkerAgreement:
    targets = [context.get_strategy().extended.input_target()]
    targets += [strategy.extended.input_target() for strategy in tracked.strategies]
    iterators = tracked.iterators.values()
    targets += [each.input_target for each in iterators if isinstance(each, Feeding)]
    return WorkerAgreement.of_targets("checkpoint", targets, timeout_seconds)


def _check_forms(slots: Mapping[str, Slot], values: Mapping[str, Any]) -> None:
    for name in slots.keys() & values.keys():
        shape = tuple(values[name].shape)
        if shape != slots[name].shape:
            raise ValueError(
                f"Checkpoint.restore: {name!r} was saved with shape {shape}, but "
                f"{slots[name].described} has another. Build the model as it was when it was "
                "saved."
            )
        saved, wanted = np.dtype(values[name].dtype), slots[name].dtype
        if wanted is not None and not can_become(saved, wanted):
            raise ValueError(
                f"Checkpoint.restore: {name!r} was saved with data type {saved.name}, whose values "
                f"{slots[name].described} of data type {wanted.name} cannot hold. Create it with "
                f"dtype={saved.name!r}, and convert its value where it is used."
            )


def _require_outside_replicas(what: str) -> None:
    replica = context.get_replica_context()
    if replica is not None and context.has_strategy():
        raise RuntimeError(
            f"Checkpoint.{what}: called inside a replica. Call it outside strategy.run()."
        )

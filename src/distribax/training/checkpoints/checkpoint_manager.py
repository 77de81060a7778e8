"""`dx.CheckpointManager`: a directory of numbered checkpoints, of which the newest are kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import SupportsInt

from distribax.errors import DamagedCheckpointError
from distribax.training.checkpoints import checkpoint_files as files
from distribax.training.checkpoints.checkpoint import Checkpoint, is_writer
from distribax.training.checkpoints.directory import find_checkpoints, get_number
from distribax.training.checkpoints.restore_status import RestoreStatus

_logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a checkpoint under a number again and again, and keeps the newest.

    With several workers all of them make a manager and call its methods; one of those with the same
    directory writes and removes.
    What a writer that was killed has left is never taken for a checkpoint, and is removed by the
    next `save`.

    Args:
        checkpoint: What is saved and restored.
        directory: Where; it is made when it is not there. One training writes to it, any number of
            others (an evaluation) may read.
        max_to_keep: How many checkpoints are kept; None keeps all.
        keep_checkpoint_every_n_hours: Of those that are too many, keep one for each so many hours
            of training. `checkpoints` does not list them.
        checkpoint_name: What the names of the checkpoints begin with.
        step_counter: A variable or array that counts the steps, for `checkpoint_interval`.
        checkpoint_interval: Let `save` do nothing until the step counter has grown by this much.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        timeout_seconds: How long workers wait for each other.

    Raises:
        TypeError: `checkpoint` is not a `dx.Checkpoint`.
        ValueError: Another argument has a value that makes no sense.

    Example:
        >>> import tempfile, distribax as dx
        >>> v = dx.Variable(1.0)
        >>> manager = dx.CheckpointManager(dx.Checkpoint(v=v), tempfile.mkdtemp(), max_to_keep=2)
        >>> for step in range(3):
        ...     _ = manager.save(step)
        >>> [path.rsplit("/")[-1] for path in manager.checkpoints]
        ['ckpt-1', 'ckpt-2']
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        *,
        checkpoint_name: str = "ckpt",
        step_counter: SupportsInt | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"CheckpointManager: checkpoint={checkpoint!r} is not a dx.Checkpoint. Pass one, "
                "for example dx.Checkpoint(model=variables)."
            )
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"CheckpointManager: max_to_keep={max_to_keep} would keep nothing. Expected a "
                "positive number, or None to keep all."
            )
        if keep_checkpoint_every_n_hours is not None and keep_checkpoint_every_n_hours <= 0:
            raise ValueError(
                f"CheckpointManager: keep_checkpoint_every_n_hours={keep_checkpoint_every_n_hours} "
                "is not positive. Expected hours between two checkpoints to keep, or None."
            )
        if not checkpoint_name or "/" in checkpoint_name or checkpoint_name.startswith("."):
            raise ValueError(
                f"CheckpointManager: checkpoint_name={checkpoint_name!r} cannot begin the name of "
                'a directory. Expected a word without "/", such as "ckpt".'
            )
        if checkpoint_interval is not None and (step_counter is None or checkpoint_interval < 1):
            raise ValueError(
                f"CheckpointManager: checkpoint_interval={checkpoint_interval} needs a "
                "step_counter, and must be positive: steps between two checkpoints."
            )
        self._checkpoint = checkpoint
        self._directory = Path(directory).absolute()
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._last_step: int | None = None
        self._init_fn = init_fn
        self._timeout_seconds = timeout_seconds
        self._hours = keep_checkpoint_every_n_hours
        # Checkpoints beyond `max_to_keep` that an earlier process has left were kept for good.
        self._kept = set(self._find_too_many()) if keep_checkpoint_every_n_hours else set()
        written = [path.stat().st_mtime for path in self._kept]
        self._last_kept = max(written, default=time.time())

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved and restored."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._directory)

    @property
    def checkpoint_interval(self) -> int | None:
        """How many steps there are at least between two checkpoints, if that was set."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, the newest last."""
        # Those that are about to be removed are left out: another worker may be removing them.
        return [str(path) for path in self._find_complete()[-(self._max_to_keep or 0) :]]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        return next(reversed(self.checkpoints), None)

    def save(
        self,
        checkpoint_number: SupportsInt | None = None,
        check_interval: bool = True,
        options: object = None,
    ) -> str | None:
        """Writes a checkpoint, and removes those that are too many.

        Args:
            checkpoint_number: The number, for example that of the step; by default one more than
                the last save had. One that is there already is replaced.
            check_interval: Whether to save only if the interval has passed.
            options: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The path, or None if the interval has not passed.

        Raises:
            ValueError: `checkpoint_number` is not a number, or is negative.
        """
        step = None if self._step_counter is None else int(self._step_counter)
        if check_interval and self._interval is not None and self._last_step is not None:
            assert step is not None
            if step - self._last_step < self._interval:
                return None
        workers = self._checkpoint.workers(self._timeout_seconds)
        writes = is_writer(workers, self._directory)
        found = self._find_complete() if workers.is_first else []
        last = max([int(self._checkpoint.save_counter), *map(get_number, found)])
        number = last + 1 if checkpoint_number is None else _check_number(checkpoint_number)
        number = workers.exchange("checkpoint number", number)[0]
        if writes and self._directory.is_dir():
            files.remove_leftovers(self._directory, f"{self._name}-")
        path = self._checkpoint.write_numbered(
            self._directory / f"{self._name}-{number}",
            number,
            timeout_seconds=self._timeout_seconds,
        )
        self._last_step = step
        # One that was replaced is the newest.
        self._kept.discard(Path(path))
        if writes:
            for old in self._find_too_many():
                self._keep_or_remove(old)
        return path

    def sync(self) -> None:
        """Returns at once, for programs written for TensorFlow: `save` and `restore` wait."""

    def _find_too_many(self) -> list[Path]:
        """Returns the complete checkpoints before those that are kept as the newest."""
        return [] if self._max_to_keep is None else self._find_complete()[: -self._max_to_keep]

    def _keep_or_remove(self, old: Path) -> None:
        if self._hours is None:
            files.remove(old)
            return
        if old in self._kept:
            return
        written = old.stat().st_mtime
        # A clock that was set back keeps one too many, not none until it has caught up.
        if 0 <= written - self._last_kept < self._hours * 3600.0:
            files.remove(old)
        else:
            self._kept.add(old)
            self._last_kept = written

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint and returns its path; if there is none, returns None.

        In the latter case `init_fn` is called, if there is one. A damaged checkpoint is left out
        with a warning, and the one before it is restored.

        Raises:
            DamagedCheckpointError: All of them are damaged.
        """
        workers = self._checkpoint.workers(self._timeout_seconds)
        found = workers.exchange("checkpoints", self.checkpoints)[0]
        if not found:
            if self._init_fn is not None:
                self._init_fn()
            return None
        newest, _ = restore_newest(self._checkpoint, found, self._timeout_seconds)
        if self._step_counter is not None:
            self._last_step = int(self._step_counter)
        return newest

    def _find_complete(self) -> list[Path]:
        """Returns all complete checkpoints, the newest last."""
        return find_checkpoints(self._directory, self._name)


def restore_newest(
    checkpoint: Checkpoint, paths: Sequence[str], timeout_seconds: float = 600.0
) -> tuple[str, RestoreStatus]:
    """Restores the last of some checkpoints that is not damaged.

    Args:
        checkpoint: What is restored.
        paths: The checkpoints, the newest last; there is at least one.
        timeout_seconds: How long workers wait for each other.

    Returns:
        The path of the one that was restored, and the status of the restore.

    Raises:
        DamagedCheckpointError: All of them are damaged.
    """
    damage: DamagedCheckpointError | None = None
    # Those whose notes are damaged are sorted first, wherever they were.
    for path in reversed(paths):
        try:
            status = checkpoint.restore(path, timeout_seconds=timeout_seconds)
        except DamagedCheckpointError as error:
            damage = damage or error
            _logger.warning("%s", error)
        else:
            if damage is not None:
                _logger.warning("Checkpoint.restore: %s was restored instead.", path)
            return path, status
    assert damage is not None
    raise damage


def _check_number(given: SupportsInt) -> int:
    try:
        number = int(given)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ValueError(
            f"CheckpointManager.save: checkpoint_number={given!r} is not a number of a checkpoint. "
            "Expected an integer that is not negative, such as the step."
        )
    return number

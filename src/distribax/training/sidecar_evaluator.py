"""`dx.SidecarEvaluator`: evaluates the checkpoints of a training that runs elsewhere."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from distribax.errors import DamagedCheckpointError
from distribax.training.checkpoints.checkpoint_files import is_complete
from distribax.training.checkpoints.directory import checkpoints_iterator, iterate_new

_logger = logging.getLogger(__name__)


class SidecarEvaluator:
    """Evaluates each new checkpoint of a directory as it comes, in a process of its own.

    If several have come meanwhile, only the newest is evaluated.

    Args:
        evaluate: Called with the path of each new checkpoint; it restores and evaluates.
        checkpoint_dir: The directory that the training writes to; it need not exist yet.
        pattern: Look for files instead of checkpoints, such as "*.weights.h5", which Keras's
            `ModelCheckpoint` writes. The newest is the one with the highest number in its name; a
            file that is written again is evaluated again.
        max_evaluations: How many checkpoints to evaluate; without a limit by default.
        until: Called with the path and the result after each evaluation; the evaluator ends when it
            returns True, for example when the last step of the training is reached.
        timeout: How many seconds to wait for another checkpoint; without a limit by default.
        min_interval_secs: How much time there is at least between two evaluations.

    Raises:
        TypeError: `evaluate` is not callable.

    Example:
        >>> import tempfile, distribax as dx
        >>> directory = tempfile.mkdtemp()
        >>> _ = dx.Checkpoint(w=dx.Variable(2.0)).save(directory + "/ckpt")
        >>> w = dx.Variable(0.0)
        >>> def evaluate(path):
        ...     dx.Checkpoint(w=w).restore(path)
        ...     return {"w": float(w)}
        >>> dx.SidecarEvaluator(evaluate, directory, max_evaluations=1).start()
        {'w': 2.0}
    """

    def __init__(
        self,
        evaluate: Callable[[str], Any],
        checkpoint_dir: str | os.PathLike[str],
        *,
        pattern: str | None = None,
        max_evaluations: int | None = None,
        until: Callable[[str, Any], bool] | None = None,
        timeout: float | None = None,
        min_interval_secs: float = 0.0,
    ) -> None:
        if not callable(evaluate):
            raise TypeError(
                f"SidecarEvaluator: evaluate={evaluate!r} is not a function. Pass one that takes "
                "the path of a checkpoint, restores it and evaluates."
            )
        self._evaluate = evaluate
        self._directory = Path(checkpoint_dir)
        self._pattern = pattern
        self._last_seen: tuple[str, Hashable] | None = None
        self._max_evaluations = max_evaluations
        self._until = until
        self._timeout = timeout
        self._min_interval_secs = min_interval_secs

    def start(self) -> Any:
        """Evaluates until a limit is reached.

        Returns:
            What the last evaluation returned; None if there was none.
        """
        num_done, result = 0, None
        for path in self._iterate_paths():
            before = self._find_file()
            try:
                result = self._evaluate(path)
            except DamagedCheckpointError as error:
                _logger.warning("%s; waiting for the next one.", error)
                continue
            except (ValueError, OSError):
                # The training keeps only the newest, or may have written it again meanwhile.
                is_there = is_complete(Path(path)) if self._pattern is None else Path(path).exists()
                if is_there and self._find_file() == before:
                    raise
                _logger.warning("SidecarEvaluator: %s is gone; waiting for the next one.", path)
                continue
            num_done += 1
            _logger.info("SidecarEvaluator: %s: %s", path, result)
            if num_done == self._max_evaluations:
                break
            if self._until is not None and self._until(path, result):
                break
        return result

    def _iterate_paths(self) -> Iterator[str]:
        if self._pattern is None:
            return checkpoints_iterator(self._directory, self._min_interval_secs, self._timeout)
        return iterate_new(self._find_finished_file, self._min_interval_secs, self._timeout)

    def _find_finished_file(self) -> tuple[str, Hashable] | None:
        """Returns the newest file if it is as it was the last time: nobody is writing it."""
        before, self._last_seen = self._last_seen, self._find_file()
        return self._last_seen if self._last_seen == before else None

    def _find_file(self) -> tuple[str, Hashable] | None:
        """Returns the newest file, and what differs if it was written again."""
        if self._pattern is None:
            return None
        newest = max(self._directory.glob(self._pattern), key=_get_numbers, default=None)
        try:
            status = None if newest is None else newest.stat()
        except FileNotFoundError:  # Removed since.
            return None
        return None if status is None else (str(newest), (status.st_size, status.st_mtime_ns))


def _get_numbers(path: Path) -> tuple[list[int], str]:
    """Returns the numbers in a name, in order: `ckpt-10` comes after `ckpt-9`."""
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name

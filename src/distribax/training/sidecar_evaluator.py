"""`dx.SidecarEvaluator`: evaluates the checkpoints of a training that runs elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribax.training.checkpoints.checkpoint_files import is_complete
from distribax.training.checkpoints.directory import checkpoints_iterator

_logger = logging.getLogger(__name__)


class SidecarEvaluator:
    """Evaluates each new checkpoint of a directory as it comes, in a process of its own.

    If several have come meanwhile, only the newest is evaluated.

    Args:
        evaluate: Called with the path of each new checkpoint; it restores and evaluates.
        checkpoint_dir: The directory that the training writes to; it need not exist yet.
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
        self._directory = checkpoint_dir
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
        for path in checkpoints_iterator(self._directory, self._min_interval_secs, self._timeout):
            try:
                result = self._evaluate(path)
            except (ValueError, OSError):
                # The training keeps only the newest, and may have removed it meanwhile.
                if is_complete(Path(path)):
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

"""`dx.PreemptionCheckpointHandler`: saves when the machine is about to be taken away."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from distribax import jax_private
from distribax.training.checkpoints.checkpoint import Checkpoint
from distribax.training.checkpoints.checkpoint_manager import CheckpointManager
from distribax.types import RESTARTABLE_EXIT_CODE

if TYPE_CHECKING:
    from distribax.cluster import ClusterResolver

_Result = TypeVar("_Result")

_NOTE = "preemption_run_calls"
_logger = logging.getLogger(__name__)

# JAX has one notice for the process, and wants to hear a growing number, the same in all workers.
_questions = itertools.count()


@dataclass(frozen=True)
class TerminationConfig:
    """How a preemption is noticed, and what is done about it.

    Args:
        termination_watcher_fn: Asked before each step whether this machine is about to be taken
            away; by default only SIGTERM tells.
        exit_fn: Called after the checkpoint is saved; by default the process ends with code 42.
        save_fn: Saves, instead of the manager's `save`.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(
                    f"TerminationConfig: {name}={value!r} is not callable. Pass a function."
                )


class PreemptionCheckpointHandler:
    """Saves a checkpoint and leaves when a worker is told to stop, and goes on after a restart.

    SIGTERM to any one worker makes all of them save after the same step and end with exit code 42.
    Started again, the program restores the newest checkpoint when it makes the handler, and
    `total_run_calls` tells how many steps are done. Steps that fetch their data themselves, from an
    iterator that is in the checkpoint, go on with the next batch.

    Args:
        cluster_resolver: As in TensorFlow; the strategy has joined the cluster already, so that
            this names the task in messages only. May be None.
        checkpoint_or_checkpoint_manager: What saves; a manager keeps its directory and its number
            of checkpoints.
        checkpoint_dir: Where to save, if a `dx.Checkpoint` is given: the newest one is kept.
        termination_config: How a preemption is noticed, and what is done about it.

    Raises:
        TypeError: The second argument is neither a checkpoint nor a manager.
        ValueError: `checkpoint_dir` is missing, or is given beside a manager.
        RuntimeError: It is created outside the main thread.

    Example:
        >>> import tempfile, distribax as dx
        >>> v = dx.Variable(0.0)
        >>> checkpoint, directory = dx.Checkpoint(v=v), tempfile.mkdtemp()
        >>> with dx.PreemptionCheckpointHandler(None, checkpoint, directory) as handler:
        ...     while handler.total_run_calls < 3:
        ...         _ = handler.run(v.assign_add, 1.0)
        >>> float(v)
        3.0
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._manager = _make_manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config = termination_config or TerminationConfig()
        self._task = _describe_task(cluster_resolver)
        self._run_calls = 0
        self._told = False
        self._previous: Any = None
        self._listening = False
        checkpoint = self._manager.checkpoint
        self._together = checkpoint.workers().num_workers > 1
        checkpoint.notes[_NOTE] = self
        self._manager.restore_or_initialize()
        if self._together:
            # JAX listens to the signal itself; this tells, early, if it was told not to.
            jax_private.has_reached_preemption_point(next(_questions))
        else:
            self._listen()

    @property
    def total_run_calls(self) -> int:
        """How often `run` has been called, before restarts too."""
        return self._run_calls

    def run(
        self, distributed_train_function: Callable[..., _Result], *args: object, **kwargs: object
    ) -> _Result:
        """Calls the function, a training step; before that saves and leaves if told to stop.

        All workers call it equally often. Fetch the batch inside the function: one that was fetched
        before it would be counted as used, and be missing after the restart.

        Args:
            distributed_train_function: The training step.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What the function returns.
        """
        self.save_checkpoint_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._run_calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and leaves if a worker was told to stop; all workers call it equally often.

        For training loops that do not use `run`.

        Args:
            *args: Passed on to the manager's `save`, or to `save_fn`.
            **kwargs: Passed on in the same way.
        """
        if not self._is_preempted():
            return
        if self._config.save_fn is not None:
            saved = self._config.save_fn(*args, **kwargs)
        else:
            saved = self._manager.save(*args, **({"check_interval": False} | kwargs))
        _logger.warning(
            "%s: told to stop; saved after %d steps (%s)", self._task, self._run_calls, saved
        )
        self.close()
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            sys.exit(RESTARTABLE_EXIT_CODE)

    def close(self) -> None:
        """Stops listening to SIGTERM; what listened before does so again."""
        if self._listening:
            signal.signal(signal.SIGTERM, self._previous)
            self._listening = False

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The number of calls is saved along with the checkpoint.

    def get_state(self) -> int:
        """Returns what a checkpoint keeps of the handler: the number of calls."""
        return self._run_calls

    def set_state(self, state: int) -> None:
        """Sets the number of calls that a checkpoint has kept.

        Args:
            state: What `get_state` returned.
        """
        self._run_calls = state

    def _is_preempted(self) -> bool:
        """Tells whether to save now; in all workers before the same step."""
        watcher = self._config.termination_watcher_fn
        if watcher is not None and not self._told and watcher():
            if self._together:
                # As JAX hears of it then, and tells the other workers.
                signal.raise_signal(signal.SIGTERM)
            self._told = True
        if self._together:
            return jax_private.has_reached_preemption_point(next(_questions))
        told, self._told = self._told, False
        return told

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "PreemptionCheckpointHandler: made in another thread than the main one, where "
                "Python cannot listen to SIGTERM. Make it in the main thread."
            )
        self._previous = signal.signal(signal.SIGTERM, self._hear) or signal.SIG_DFL
        self._listening = True

    def _hear(self, *_: object) -> None:
        self._told = True


def _make_manager(
    given: Checkpoint | CheckpointManager, directory: str | os.PathLike[str] | None
) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        if directory is not None:
            raise ValueError(
                f"PreemptionCheckpointHandler: checkpoint_dir={directory!r} was given beside a "
                f"CheckpointManager, which saves to {given.directory!r}. Leave it out."
            )
        return given
    if not isinstance(given, Checkpoint):
        raise TypeError(
            f"PreemptionCheckpointHandler: checkpoint_or_checkpoint_manager={given!r} is neither. "
            "Pass a dx.Checkpoint and checkpoint_dir, or a dx.CheckpointManager."
        )
    if directory is None:
        raise ValueError(
            "PreemptionCheckpointHandler: checkpoint_dir=None, but a dx.Checkpoint does not know "
            "where to save. Pass the directory, or a dx.CheckpointManager."
        )
    return CheckpointManager(given, directory, max_to_keep=1)


def _describe_task(resolver: ClusterResolver | None) -> str:
    if resolver is None or resolver.task_type is None:
        return "this process"
    return f"{resolver.task_type} {resolver.task_id}"

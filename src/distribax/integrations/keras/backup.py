"""Training that goes on where it was interrupted, in the middle of an epoch too."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distribax.integrations.keras.chief import is_chief
from distribax.integrations.keras.models import get_home
from distribax.integrations.keras.step_kinds import ResumableStep
from distribax.training.checkpoints.checkpoint import Checkpoint
from distribax.training.checkpoints.checkpoint_manager import CheckpointManager
from distribax.training.preemption import PreemptionCheckpointHandler, TerminationConfig


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the state of `fit`, and lets the next `fit` go on after the last batch that was saved.

    Unlike the callback of Keras with this name, it goes on in the middle of an epoch, with the
    metrics, the random numbers of layers and the order of the examples as they were. The order is
    that of arrays and of `keras.utils.PyDataset`; data sets must give the same batches again, as
    those do that are not shuffled, or with `reshuffle_each_iteration=False` and a seed.

    Args:
        backup_dir: The folder for the state, which all workers can reach.
        save_freq: After how many batches to save, or "epoch": at the end of each epoch.
        delete_checkpoint: Whether to delete the state when the training has ended.
        save_before_preemption: Whether to save, and to leave with exit code 42, when a worker is
            told to stop (SIGTERM), as `dx.PreemptionCheckpointHandler` does: all workers leave
            after the same batch, and `distribax run` starts them again.

    Raises:
        ValueError: `save_freq` is neither "epoch" nor at least 1.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: int | str = "epoch",
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(
                f"BackupAndRestore: save_freq={save_freq!r} is neither 'epoch' nor a number of "
                "batches of at least 1."
            )
        self._folder = Path(backup_dir)
        self._save_freq = save_freq
        self._delete = delete_checkpoint
        self._saves_before_preemption = save_before_preemption
        self._handler: PreemptionCheckpointHandler | None = None
        self._state: dict[str, Any] = {}
        # The metrics in the middle of the epoch that the training goes on with.
        self._measured: list[np.ndarray] | None = None
        self._unsaved = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the saved state, if there is one.

        Args:
            logs: As Keras passes them.

        Raises:
            ValueError: The model, without a strategy, cannot go on in the middle of an epoch.
        """
        model = self.model
        in_the_middle = self._save_freq != "epoch" or self._saves_before_preemption
        if in_the_middle and not isinstance(model.train_function, ResumableStep):
            given = "save_before_preemption=True"
            if self._save_freq != "epoch":
                given = f"save_freq={self._save_freq}"
            raise ValueError(
                f"BackupAndRestore: {given} goes on in the middle of an epoch, but {model.name} "
                "has no strategy. Make it in a scope, with dx.OneDeviceStrategy for example, or "
                "use save_freq='epoch' alone."
            )
        self._state = {"epoch": np.int32(0), "batch": np.int32(0), **_get_random_state()}
        metrics = list(model.metrics_variables)
        checkpoint = Checkpoint(
            model=model, optimizer=model.optimizer, metrics=metrics, state=self._state
        )
        self._manager = CheckpointManager(checkpoint, self._folder, max_to_keep=1)
        latest = self._manager.latest_checkpoint
        if self._saves_before_preemption:
            # It restores the newest one.
            config = TerminationConfig(save_fn=self._save)
            self._handler = PreemptionCheckpointHandler(
                None, self._manager, termination_config=config
            )
        if latest is None:
            return
        if self._handler is None:
            checkpoint.restore(latest).assert_consumed()
        model._initial_epoch = int(self._state["epoch"])
        self._measured = [variable.numpy() for variable in metrics]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Goes to the batch where the training was, or notes where the epoch begins.

        Args:
            epoch: The number of the epoch.
            logs: As Keras passes them.
        """
        if self._measured is None:
            self._state.update(epoch=np.int32(epoch), batch=np.int32(0), **_get_random_state())
            return
        if self._state["batch"] > 0:
            for variable, value in zip(self.model.metrics_variables, self._measured, strict=True):
                variable.assign(value)
        self._measured = None
        _set_random_state(self._state)
        if self._state["batch"] > 0:
            self.model.train_function.skip(int(self._state["batch"]))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and leaves if a worker was told to stop.

        Args:
            batch: The number of the batch in the epoch.
            logs: As Keras passes them.
        """
        if self._handler is not None and batch >= int(self._state["batch"]):
            self._handler.run(lambda: None)  # Keras runs the step.

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if it is time to.

        Args:
            batch: The number of the batch in the epoch.
            logs: As Keras passes them.
        """
        done = batch + 1
        if done <= int(self._state["batch"]):
            return  # One that had been trained before the interruption.
        self._unsaved += done - int(self._state["batch"])
        self._state["batch"] = np.int32(done)
        if self._save_freq != "epoch" and self._unsaved >= int(self._save_freq):
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves the end of the epoch.

        Args:
            epoch: The number of the epoch.
            logs: As Keras passes them.
        """
        self._state.update(epoch=np.int32(epoch + 1), batch=np.int32(0), **_get_random_state())
        if self._save_freq == "epoch":
            self._save()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes what was saved, unless it is to be kept.

        Args:
            logs: As Keras passes them.
        """
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        # A later `fit` of the model begins where it is told to.
        self.model._initial_epoch = None
        if self._delete and is_chief(get_home(self.model)):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self) -> str | None:
        self._unsaved = 0
        return self._manager.save(check_interval=False)


def _get_random_state() -> dict[str, np.ndarray]:
    """Returns the random numbers by which Keras shuffles arrays and data sets."""
    generator: Any = np.random.get_state()
    _, keys, position, *_ = generator
    return {
        "numpy": np.array([*keys, position], np.uint32),
        "python": np.array(random.getstate()[1], np.uint32),
    }


def _set_random_state(state: dict[str, np.ndarray]) -> None:
    keys = np.asarray(state["numpy"], np.uint32)
    np.random.set_state(("MT19937", keys[:-1], int(keys[-1]), 0, 0.0))
    random.setstate((3, tuple(int(key) for key in state["python"]), None))

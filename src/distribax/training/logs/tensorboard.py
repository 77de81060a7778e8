"""`dx.logging.TensorBoard`: writes event files, without TensorFlow."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import jax
import numpy as np

from distribax import jax_private
from distribax.data.formats.tfrecord import TFRecordWriter
from distribax.training.logs import event_messages as messages

_FLUSH_SECONDS: Final = 10.0


class TensorBoard:
    """Writes what TensorBoard shows: numbers, text and histograms, each with its step.

    With several workers all may write: only the first one does it, the others' calls do nothing.
    It is a context manager, and threads may share it. Events are written to disk every ten
    seconds, and by `flush` and `close`.

    Args:
        folder: Where the file goes; it is created. One folder for each run, so that
            `tensorboard --logdir` on the folder above compares them.

    Raises:
        OSError: The folder cannot be written.

    Example:
        >>> import tempfile, distribax as dx
        >>> folder = tempfile.mkdtemp()
        >>> with dx.logging.TensorBoard(folder) as board:
        ...     board.log_scalar("loss", 0.5, step=1)
        ...     board.log_metrics({"accuracy": 0.9}, step=1)
        >>> import os
        >>> os.listdir(folder)[0].startswith("events.out.tfevents.")
        True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._lock = threading.Lock()
        self._writer: TFRecordWriter | None = None
        self._is_closed = False
        if jax_private.get_process_id() != 0:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = TFRecordWriter(os.fspath(Path(folder) / name))
        self._writer.write(messages.encode_event(now, 0, version=messages.VERSION))
        self._writer.flush()
        self._flush_at = time.monotonic() + _FLUSH_SECONDS

    def log_scalar(self, tag: str, value: jax.typing.ArrayLike, step: int) -> None:
        """Writes a number.

        Args:
            tag: The name of its chart; names with a common "part/" are shown together.
            value: The number; an array must have one element.
            step: The step it belongs to.

        Raises:
            ValueError: The value is not one number, or the log was closed.
        """
        number = np.asarray(value)
        if number.size != 1:
            raise ValueError(
                f"log_scalar: value of {tag!r} has the shape {number.shape}. Expected one number; "
                "for arrays there is log_histogram."
            )
        self._write(messages.encode_scalar(tag, float(number.reshape(()))), step)

    def log_text(self, tag: str, text: str, step: int = 0) -> None:
        """Writes text, which TensorBoard shows as Markdown.

        Args:
            tag: Its name.
            text: The text.
            step: The step it belongs to.

        Raises:
            ValueError: The log was closed.
        """
        self._write(messages.encode_text(tag, text), step)

    def log_histogram(self, tag: str, values: jax.typing.ArrayLike, step: int) -> None:
        """Writes how often which values occur in an array, such as a variable or a gradient.

        Args:
            tag: Its name.
            values: The array.
            step: The step it belongs to.

        Raises:
            ValueError: The array is empty or has values that are not finite, or the log was closed.
        """
        array = np.asarray(values)
        if not array.size or not np.isfinite(array.astype(np.float64)).all():
            raise ValueError(
                f"log_histogram: values of {tag!r} are empty or not all finite. Expected an array "
                "with numbers; jnp.nan_to_num(values) replaces what is not finite."
            )
        self._write(messages.encode_histogram(tag, array), step)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Writes several numbers; `dx.logging.MetricLogger` calls it.

        Args:
            values: The numbers by their names.
            step: The step they belong to.

        Raises:
            ValueError: A value is not one number, or the log was closed.
        """
        for tag, value in values.items():
            self.log_scalar(tag, value, step)

    def flush(self) -> None:
        """Writes all events to disk."""
        with self._lock:
            if self._writer is not None and not self._is_closed:
                self._writer.flush()

    def close(self) -> None:
        """Writes all events to disk and closes the file; more than once is no error."""
        with self._lock:
            if self._writer is not None and not self._is_closed:
                self._writer.close()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, summary: bytes, step: int) -> None:
        event = messages.encode_event(time.time(), step, summary=summary)
        with self._lock:
            if self._is_closed:
                raise ValueError("TensorBoard: the log was closed. Open another one.")
            if self._writer is None:
                return
            self._writer.write(event)
            if time.monotonic() >= self._flush_at:
                self._writer.flush()
                self._flush_at = time.monotonic() + _FLUSH_SECONDS

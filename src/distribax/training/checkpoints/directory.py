"""Looking at checkpoints without the program that saved them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import numpy as np

from distribax.training.checkpoints import checkpoint_files as files

_POLL_SECONDS = 1.0
"""How often `checkpoints_iterator` looks."""


def find_checkpoints(directory: Path, name: str | None = None) -> list[Path]:
    """Returns the complete, numbered checkpoints of a directory, the newest last."""
    if not directory.is_dir():
        return []
    named = re.compile((r".+" if name is None else re.escape(name)) + r"-\d+")
    paths = [directory / each for each in files.find_names(directory) if named.fullmatch(each)]
    complete = [path for path in paths if files.is_complete(path)]
    # After going back to an earlier checkpoint, a training saves smaller numbers later.
    return sorted(complete, key=lambda path: (files.get_order(path), get_number(path)))


def get_number(path: Path) -> int:
    """Returns the number that a checkpoint's name ends with."""
    return int(path.name.rpartition("-")[2])


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None
) -> str | None:
    """Returns the path of the newest checkpoint in a directory.

    Args:
        checkpoint_dir: The directory.
        latest_filename: Accepted as in TensorFlow; it changes nothing.

    Returns:
        The path, or None if there is no checkpoint.
    """
    found = find_checkpoints(Path(checkpoint_dir).absolute())
    return str(found[-1]) if found else None


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0.0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new checkpoint of a directory as it comes, for an evaluation beside a training.

    If several have come meanwhile, only the newest is yielded.

    Args:
        checkpoint_dir: The directory, which need not exist yet.
        min_interval_secs: How much time there is at least between two of them.
        timeout: How many seconds to wait for another one; without a limit by default.
        timeout_fn: Called when the time is over; if it returns True the iteration ends, else the
            wait goes on. Without it, the iteration ends.

    Returns:
        An iterator of the paths.
    """
    return iterate_new(lambda: _identify(checkpoint_dir), min_interval_secs, timeout, timeout_fn)


def iterate_new(
    identify: Callable[[], tuple[str, Hashable] | None],
    min_interval_secs: float,
    timeout: float | None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new path as it comes, as `checkpoints_iterator` does.

    Args:
        identify: Returns the newest path, with something that differs if it was written again.
        min_interval_secs: How much time there is at least between two of them.
        timeout: How many seconds to wait for another one; None waits without a limit.
        timeout_fn: Tells whether to end when the time is over.

    Yields:
        The paths.
    """
    last: tuple[str, Hashable] | None = None
    while True:
        began = time.monotonic()
        while (newest := identify()) is None or newest == last:
            if timeout is not None and time.monotonic() - began >= timeout:
                if timeout_fn is None or timeout_fn():
                    return
                began = time.monotonic()
            time.sleep(_POLL_SECONDS if timeout is None else min(_POLL_SECONDS, timeout))
        last = newest
        yielded = time.monotonic()
        yield newest[0]
        time.sleep(max(0.0, yielded + min_interval_secs - time.monotonic()))


def _identify(directory: str | os.PathLike[str]) -> tuple[str, int] | None:
    """Returns the newest checkpoint, and its place, which differs if it was written again."""
    newest = latest_checkpoint(directory)
    return None if newest is None else (newest, files.get_order(Path(newest)))


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the names and shapes of all values in a checkpoint.

    Args:
        ckpt_dir_or_file: A checkpoint, or a directory of which the newest is taken.

    Returns:
        Pairs of name and shape, sorted by name.

    Raises:
        ValueError: There is no checkpoint.
    """
    return sorted(files.read_shapes(_resolve(ckpt_dir_or_file)).items())


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray:
    """Returns one value of a checkpoint.

    Args:
        ckpt_dir_or_file: A checkpoint, or a directory of which the newest is taken.
        name: The name, one of those that `list_variables` returns.

    Returns:
        The value.

    Raises:
        ValueError: There is no checkpoint, or it has no such value.
    """
    values, _ = files.read(_resolve(ckpt_dir_or_file))
    if name not in values:
        raise ValueError(
            f"load_variable: name={name!r} is not in {os.fspath(ckpt_dir_or_file)!r}. It has: "
            f"{', '.join(sorted(values))}."
        )
    return np.asarray(values[name])


def _resolve(path: str | os.PathLike[str]) -> Path:
    given = Path(path).absolute()
    newest = None if files.is_complete(given) else latest_checkpoint(given)
    return given if newest is None else Path(newest)

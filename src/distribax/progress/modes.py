"""Whether and how progress is shown."""

from __future__ import annotations

import enum
import os
import sys
from typing import Final

PROGRESS_VARIABLE: Final = "DISTRIBAX_PROGRESS"
"""Says how progress is shown, until `dx.set_progress` does: "auto", "live", "log" or "off"."""


class ProgressMode(enum.StrEnum):
    """How work that takes longer than a second is shown; each is equal to its name."""

    AUTO = "auto"
    """As LIVE if standard error is a terminal, else as LOG."""
    LIVE = "live"
    """A line that is redrawn while the work goes on, and removed afterwards."""
    LOG = "log"
    """One line in the log "distribax.progress", of the level INFO."""
    OFF = "off"
    """Not at all."""


_chosen: ProgressMode | None = None


def set_progress(mode: str) -> None:
    """Sets how work that takes long is shown, from now on and in this process.

    It concerns compiling, joining a cluster, saving and restoring, and waiting for servers. Before
    the first call, the environment variable DISTRIBAX_PROGRESS counts, and "auto" without it.

    Args:
        mode: "auto" is "live" in a terminal and "log" elsewhere, "live" a line that is redrawn,
            "log" one line in the log `distribax.progress`, and "off" nothing.

    Raises:
        ValueError: There is no such mode.

    Example:
        >>> import distribax as dx
        >>> dx.set_progress("off")
        >>> dx.get_progress()
        'off'
        >>> dx.set_progress("auto")
    """
    global _chosen
    _chosen = _parse(mode, "set_progress(mode)")


def get_progress() -> str:
    """Returns how work that takes long is shown: "auto", "live", "log" or "off".

    Raises:
        ValueError: The environment variable DISTRIBAX_PROGRESS has another value.
    """
    if _chosen is not None:
        return str(_chosen)
    return str(_parse(os.environ.get(PROGRESS_VARIABLE, "auto"), PROGRESS_VARIABLE))


def decide() -> ProgressMode:
    """Returns the mode, where AUTO has been decided: LIVE, LOG or OFF."""
    mode = ProgressMode(get_progress())
    if mode is not ProgressMode.AUTO:
        return mode
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # There is none, or it was closed.
        return ProgressMode.LOG
    return ProgressMode.LIVE if is_terminal else ProgressMode.LOG


def _parse(text: str, field: str) -> ProgressMode:
    try:
        return ProgressMode(text)
    except ValueError:
        names = ", ".join(repr(str(mode)) for mode in ProgressMode)
        raise ValueError(f"{field}={text!r} is not known. Expected one of {names}.") from None

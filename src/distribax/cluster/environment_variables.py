"""Numbers in environment variables."""

from __future__ import annotations

import math
import os


def read_integer(name: str, minimum: int = 0) -> int | None:
    """Returns the number in an environment variable; None if the variable is not set.

    Raises:
        ValueError: The variable is not a whole number, or too small.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    digits = text.strip()
    # Nothing here is counted in billions, and Python refuses to convert very long numbers.
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) >= minimum):
        raise ValueError(f"{name}={text!r}: expected a whole number, at least {minimum}.")
    return int(digits)


def read_seconds(name: str, default: float) -> float:
    """Returns the time limit in an environment variable; the default if the variable is not set.

    Raises:
        ValueError: The variable is not a number of seconds, more than 0.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name}={text!r}: expected a number of seconds, more than 0.")
    return seconds

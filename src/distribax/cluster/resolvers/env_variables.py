"""Numbers in environment variables."""

from __future__ import annotations

import os


def integer_variable(name: str, minimum: int = 0) -> int | None:
    """Returns the number in an environment variable; None if the variable is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    digits = text.strip()
    # Nothing here is counted in billions, and Python refuses to convert very long numbers.
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) >= minimum):
        raise ValueError(f"{name}={text!r}: expected a whole number, at least {minimum}.")
    return int(digits)

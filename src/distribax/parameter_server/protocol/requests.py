"""What a client can ask a server: the word under "do" in a message's header."""

from __future__ import annotations

import enum
from typing import Final

PARAMETERS_LOST: Final = "ParametersLost"
"""The kind of error when a server does not know, or no longer, what a request names."""


class Request(enum.StrEnum):
    """The kinds of requests."""

    HELLO = "hello"
    """Introduces the client; the first request of a connection."""
    CREATE = "create"
    """Creates a parameter."""
    REGISTER = "register"
    """Registers an optimizer."""
    MAP = "map"
    """Asks where parameters lie in shared memory."""
    PULL = "pull"
    """Asks for the values that have changed."""
    ROWS = "rows"
    """Asks for some rows of parameters."""
    PUSH = "push"
    """Has operations applied, all or none, and exactly once."""
    BEGIN_SHARES = "begin_shares"
    """Waits until the client may compute a contribution to the rounds of some parameters."""
    RETURN_SHARES = "return_shares"
    """Gives up the shares that the client has begun and does not contribute."""
    WATCH_ROUNDS = "watch_rounds"
    """Tells which workers have nothing to do; asks which rounds are incomplete."""
    COMPLETE_ROUNDS = "complete_rounds"
    """Has all rounds applied with the contributions that have arrived."""
    SET_NOTE = "set_note"
    """Keeps a note, unless there is one with that key."""
    NOTE = "note"
    """Asks for a note."""
    STATUS = "status"
    """Asks what the server holds and has done."""

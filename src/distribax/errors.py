"""Exceptions that cross layers, and signals that the engine sends to itself."""

from __future__ import annotations


class ControlFlow(BaseException):
    """Base of the signals that the engine sends to itself through user code.

    They derive from BaseException so that a user's `except Exception` does not swallow them.
    """


class ReplicaAborted(ControlFlow):
    """Unwinds a replica's thread because another replica has failed."""


class HostOnly(ControlFlow):
    """Stops a trace: what was asked needs the host.

    Attributes:
        reason: What needs the host.
        mode: "eager" (pieces of different shape), "create" (a variable whose initial value is
            computed in the function), or "loop" (a loop over a distributed data set).
    """

    def __init__(self, reason: str, mode: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.mode = mode


class OutOfRangeError(StopIteration):
    """The input is exhausted; also a StopIteration, so that loops end."""

"""`RemoteValue`: the result of a scheduled function, now or later."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from distribax.coordinator.pickling import dumps
from distribax.coordinator.references import Definition, Kind, Reference, new_number


class RemoteValueStatus(enum.Enum):
    """How far a scheduled function is."""

    NOT_READY = "not ready"
    """It waits or runs."""
    READY = "ready"
    """It has finished."""
    ABORTED = "aborted"
    """It has failed, or was cancelled."""


class Waiting(Protocol):
    """Who knows when a value is there."""

    def wait_for(self, value: RemoteValue) -> None: ...


class RemoteValue(Reference):
    """The result of a function that was scheduled, which may not be there yet.

    `coordinator.schedule` returns it. It may be an argument of another scheduled function, which
    then runs when the value is there.
    """

    __slots__ = ("__weakref__", "_definition", "_number", "_result", "_status", "_waiting")

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._status = RemoteValueStatus.NOT_READY
        # The value, or the exception.
        self._result: Any = None
        self._number = 0
        self._definition: Definition | None = None

    def fetch(self) -> Any:
        """Waits for the result and returns it, arrays as NumPy arrays.

        If the function has failed its exception is raised, each time; if it was cancelled, a
        `ClosureCancelledError`.
        """
        if self._status is RemoteValueStatus.NOT_READY:
            self._waiting.wait_for(self)
        if self._status is RemoteValueStatus.ABORTED:
            raise self._result.with_traceback(None)
        return self._result

    def get(self) -> Any:
        """Waits for the result and returns it, arrays as JAX arrays on the default device."""
        return jax.tree.map(_on_device, self.fetch())

    @property
    def status(self) -> RemoteValueStatus:
        """How far the function is; it does not wait."""
        return self._status

    def set_value(self, value: Any) -> None:
        """Settles the value; the coordinator's."""
        self._result = value
        self._status = RemoteValueStatus.READY

    def set_error(self, error: BaseException) -> None:
        """Settles the value with an exception; the coordinator's."""
        self._result = error
        self._status = RemoteValueStatus.ABORTED

    @property
    def error(self) -> BaseException | None:
        """Why there is no value and never will be, or None."""
        return self._result if self._status is RemoteValueStatus.ABORTED else None

    # As an argument of another function.

    def belongs_to(self, waiting: Waiting) -> bool:
        """Tells whether `waiting` is the queue that this value comes from."""
        return self._waiting is waiting

    @property
    def is_settled(self) -> bool:
        return self._status is not RemoteValueStatus.NOT_READY

    @property
    def reference_number(self) -> int:
        if not self._number:
            self._number = new_number()
        return self._number

    @property
    def definition(self) -> Definition:
        assert self._status is RemoteValueStatus.READY
        if self._definition is None:
            data, needs = dumps(self._result)
            self._definition = Definition(
                Kind.VALUE, "a remote value", lambda _: data, needs, self.reference_number
            )
        return self._definition

    def __repr__(self) -> str:
        return f"<RemoteValue, {self._status.value}>"


def _on_device(leaf: Any) -> Any:
    # Texts and objects have no place on a device.
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "OSUMm":
        return jnp.asarray(leaf)
    return leaf

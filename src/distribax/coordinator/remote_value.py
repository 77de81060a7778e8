"""`RemoteValue`: the result of a scheduled function, now or later."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax.coordinator.pickling import dump_value
from distribax.coordinator.references import (
    Definition,
    DefinitionKind,
    WorkerReference,
    make_number,
)


class RemoteValueStatus(enum.Enum):
    """How far a scheduled function is."""

    NOT_READY = "not ready"
    """It waits or runs."""
    READY = "ready"
    """It has finished."""
    ABORTED = "aborted"
    """It has failed, or was cancelled."""


class ValueQueue(Protocol):
    """Knows when the value of a scheduled function is settled."""

    def wait_for(self, value: RemoteValue) -> None:
        """Waits until the value is settled."""


class RemoteValue(WorkerReference):
    """The result of a scheduled function, now or later.

    `coordinator.schedule` returns it. As an argument of another scheduled function it becomes the
    result itself; the function is run as soon as the result is known.

    Args:
        queue: The queue that settles it.
    """

    __slots__ = ("_number", "_queue", "_result", "_status")

    def __init__(self, queue: ValueQueue) -> None:
        super().__init__()
        self._queue = queue
        self._status = RemoteValueStatus.NOT_READY
        # The value, or the exception.
        self._result: Any = None
        self._number = 0

    def fetch(self) -> Any:
        """Waits for the result and returns it, arrays as NumPy arrays.

        Returns:
            What the function returned.

        Raises:
            ClosureCancelledError: If the function was cancelled because another one had failed.
            Exception: The function's own exception if it has failed, each time.
        """
        if self._status is RemoteValueStatus.NOT_READY:
            self._queue.wait_for(self)
        if self._status is RemoteValueStatus.ABORTED:
            raise self._result.with_traceback(None)
        return self._result

    def get(self) -> Any:
        """Waits for the result and returns it, arrays as JAX arrays on the default device.

        Returns:
            What the function returned.

        Raises:
            ClosureCancelledError: If the function was cancelled because another one had failed.
            Exception: The function's own exception if it has failed, each time.
        """
        return jax.tree.map(_put_on_device, self.fetch())

    @property
    def status(self) -> RemoteValueStatus:
        """How far the function is; asking does not wait."""
        return self._status

    # For the coordinator.

    def set_value(self, value: object) -> None:
        """Settles the value with a result.

        Args:
            value: The result.
        """
        self._result = value
        self._status = RemoteValueStatus.READY

    def set_error(self, error: BaseException) -> None:
        """Settles the value with an exception.

        Args:
            error: The exception.
        """
        self._result = error
        self._status = RemoteValueStatus.ABORTED

    @property
    def error(self) -> BaseException | None:
        """The exception that the value is settled with, or None."""
        return self._result if self._status is RemoteValueStatus.ABORTED else None

    # As an argument of another function.

    def belongs_to(self, queue: ValueQueue) -> bool:
        """Tells whether the value comes from a queue.

        Args:
            queue: The queue of a coordinator.

        Returns:
            Whether its closures include the function of this value.
        """
        return self._queue is queue

    @property
    def is_settled(self) -> bool:
        """Whether the function has ended, or never will run."""
        return self._status is not RemoteValueStatus.NOT_READY

    @property
    @override
    def reference_number(self) -> int:
        """The number that stands for the value in a pickle."""
        if not self._number:
            self._number = make_number()
        return self._number

    @override
    def _define(self) -> Definition:
        assert self._status is RemoteValueStatus.READY
        data, needs = dump_value(self._result)
        number = self.reference_number
        return Definition(DefinitionKind.VALUE, "a remote value", lambda _: data, needs, number)

    @override
    def __repr__(self) -> str:
        return f"<RemoteValue, {self._status.value}>"


def _put_on_device(leaf: object) -> object:
    # Devices cannot hold strings, dates and objects.
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "OSUMm":
        return jnp.asarray(leaf)
    return leaf

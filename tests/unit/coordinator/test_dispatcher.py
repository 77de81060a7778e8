"""The dispatcher's thread, when it ends by a mistake."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from distribax.coordinator import ClosureCancelledError
from distribax.coordinator.dispatcher import Dispatcher
from distribax.coordinator.failure_policy import FailurePolicy
from distribax.coordinator.progress import Hidden
from distribax.coordinator.worker_handle import WorkerHandle
from tests.unit.coordinator.closures import put


class Broken(WorkerHandle):
    """A worker that cannot even be asked to start."""

    def start(self, answer: Any) -> None:
        raise ZeroDivisionError("a mistake")

    def end(self) -> None:
        """There is no process."""


def test_a_mistake_is_told_to_users_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", noticed.append)
    dispatcher = Dispatcher(4, [Broken(0, {}, b"")], FailurePolicy(), lambda: (), Hidden().update)
    (waiting,) = put(dispatcher.queue, 1)
    dispatcher.open()
    with pytest.raises(RuntimeError, match="a mistake of distribax, ZeroDivisionError"):
        dispatcher.queue.join()
    with pytest.raises(ClosureCancelledError, match="a mistake of distribax"):
        waiting.value.fetch()
    dispatcher.close()
    assert [each.exc_type for each in noticed] == [ZeroDivisionError]

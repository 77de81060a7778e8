"""Which worker this process is."""

from __future__ import annotations

_index: list[int] = []


def set_worker_index(index: int) -> None:
    """Makes this process the worker of that index."""
    _index[:] = [index]


def experimental_get_current_worker_index() -> int:
    """Returns the index of the worker that runs the function which asks.

    An error outside a function that `coordinator.schedule` or `create_per_worker_dataset` sends to
    a worker.
    """
    if not _index:
        raise RuntimeError(
            "experimental_get_current_worker_index: this is not a worker. Call it inside a "
            "function that is given to coordinator.schedule() or create_per_worker_dataset()."
        )
    return _index[0]

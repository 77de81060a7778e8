"""Whose position an iterator saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

_GLOBAL = "global"
_PER_WORKER = "per_worker"


@dataclass(frozen=True)
class PositionOwner:
    """The workers whose place in the data a position is.

    Attributes:
        num_workers: How many workers have data of their own; 1 if all read the same data together,
            so that a position fits any number of workers.
        worker_id: Which of them the position belongs to.
    """

    num_workers: int = 1
    worker_id: int = 0

    @property
    def is_global(self) -> bool:
        """Whether the position is that of all workers together."""
        return self.num_workers == 1

    @classmethod
    def load(cls, saved: dict[str, Any]) -> PositionOwner:
        """Returns the owner that `save` has turned into JSON-able data."""
        if saved["kind"] == _GLOBAL:
            return cls()
        return cls(saved["num_workers"], saved["worker_id"])

    def save(self) -> dict[str, Any]:
        """Returns the owner as JSON-able data."""
        if self.is_global:
            return {"kind": _GLOBAL}
        return {
            "kind": _PER_WORKER,
            "num_workers": self.num_workers,
            "worker_id": self.worker_id,
        }

    @override
    def __str__(self) -> str:
        if self.is_global:
            return "all workers together"
        return f"worker {self.worker_id} of {self.num_workers}, which has its own data"

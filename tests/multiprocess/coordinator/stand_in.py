"""A strategy without variables, for tests of the coordinator alone."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distribax.cluster.ray.engine import Engine
from distribax.types import Args, Kwargs, StepFn


@dataclass
class PlainSetup:
    """Runs functions as they are; `trouble` is code that `start` executes."""

    trouble: str = ""

    def start(self, worker_index: int) -> None:
        exec(self.trouble, {"index": worker_index, "Path": pathlib.Path})

    def run(self, fn: StepFn, args: Args, kwargs: Kwargs) -> Any:
        return fn(*args, **kwargs)

    def flush(self) -> None:
        pass


@dataclass(eq=False)
class PlainStrategy:
    """Has an engine, and nothing else."""

    engine: Engine
    setup: Any = field(default_factory=PlainSetup)
    cluster_coordinator: Any = None
    num_completed: int = 0

    def worker_setup(self) -> Any:
        return self.setup

    def complete_rounds(self) -> None:
        self.num_completed += 1

    def server_status(self) -> Sequence[Mapping[str, Any]]:
        return [{"index": 0, "state": "ready"}]

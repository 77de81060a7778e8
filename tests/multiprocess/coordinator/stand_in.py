"""A strategy without variables, for tests of the coordinator alone."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distribax.cluster.ray.engine import Engine
from distribax.parameter_server.strategy import ParameterServerStrategy


@dataclass
class PlainSetup:
    """A strategy without a scope; `trouble` is code that `start` executes."""

    trouble: str = ""

    def start(self, worker_index: int) -> PlainSetup:
        exec(self.trouble, {"index": worker_index, "Path": pathlib.Path})
        return self

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def flush(self) -> None:
        pass

    def check_servers(self) -> None:
        pass


@dataclass(eq=False)
class PlainStrategy(ParameterServerStrategy):
    """Has an engine, and nothing else."""

    engine: Engine
    setup: Any = field(default_factory=PlainSetup)
    cluster_coordinator: Any = None
    num_watched: int = 0
    num_finished: int = 0

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return PlainSetup, ()

    def worker_setup(self) -> Any:
        return self.setup

    def watch_rounds(self, idle: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        self.num_watched += 1
        return ()

    def finish_rounds(self) -> None:
        self.num_finished += 1

    def server_status(self) -> Sequence[Mapping[str, Any]]:
        return [{"index": 0, "state": "ready"}]

"""Servers in this process, and a record of what travels between them and the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.parameter_server import Apply, Scatter, SparseGradient
from distribax.testing import local_servers
from tests import turns

_PLACES = ("where", "table", "make")
"""Parameters that say where a table is."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves every function both modes on divided tables, and one on each other kind, in turn.

    Whole tables on servers go the ways of the parts of a divided one, and tables in this process
    are variables as the contract tries them.
    """
    turns.leave_out(config, items, Path(__file__).parent, _is_left_out)


def _is_left_out(item: pytest.Item) -> bool:
    params = turns.get_params(item)
    places = [name for name in _PLACES if isinstance(params.get(name), str)]
    if turns.MODE not in params or not places or params[places[0]] == "sharded":
        return False
    return not turns.is_its_turn(item, places[0])


@dataclass
class Traffic:
    """What a client has asked of the servers, and sent to them."""

    fetched_rows: list[list[int]] = field(default_factory=list)
    pulled: list[str] = field(default_factory=list)
    pushed_rows: list[list[int]] = field(default_factory=list)
    pushed_bytes: int = 0

    def clear(self) -> None:
        """Forgets what was so far."""
        self.fetched_rows.clear()
        self.pulled.clear()
        self.pushed_rows.clear()
        self.pushed_bytes = 0

    def note_push(self, by_server: Any) -> None:
        """Notes the arrays of a push."""
        for operation in [each for group in by_server.values() for each in group]:
            parts = [operation]
            if isinstance(operation, Apply):
                parts = [part for part in operation.gradients if part is not None]
            for part in parts:
                if isinstance(part, (SparseGradient, Scatter)):
                    self.pushed_rows.append(np.asarray(part.indices).tolist())
                    rows = part.rows if isinstance(part, SparseGradient) else part.updates
                    self.pushed_bytes += np.asarray(rows).nbytes
                else:
                    whole = getattr(part, "value", getattr(part, "delta", part))
                    self.pushed_bytes += np.asarray(whole).nbytes


@pytest.fixture
def strategy() -> Iterator[Any]:
    """Two servers; variables of more than one row are divided in two."""
    with local_servers(2) as strategy:
        strategy.variable_partitioner = dx.partitioners.FixedShardsPartitioner(2)
        yield strategy


@pytest.fixture
def whole(strategy: Any) -> Any:
    """The same strategy without a partitioner."""
    strategy.variable_partitioner = None
    return strategy


@pytest.fixture
def traffic(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """A record of what travels."""
    record, client = Traffic(), strategy.source.client
    pull_rows, pull, push = client.pull_rows, client.pull_versions, client.push

    def noted_rows(wanted: Any) -> Any:
        record.fetched_rows += [np.asarray(indices).tolist() for _, indices in wanted]
        return pull_rows(wanted)

    def noted_pull(specs: Any) -> Any:
        record.pulled += [spec.name for spec in specs]
        return pull(specs)

    def noted_push(by_server: Any) -> None:
        record.note_push(by_server)
        push(by_server)

    monkeypatch.setattr(client, "pull_rows", noted_rows)
    monkeypatch.setattr(client, "pull_versions", noted_pull)
    monkeypatch.setattr(client, "push", noted_push)
    return record

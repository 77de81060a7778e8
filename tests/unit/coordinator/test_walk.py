"""The walk of a scheduled function goes through four folders, and never back up."""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.coordinator import PerWorkerDataset, references, worker
from distribax.coordinator.messages import ClosureBatch, Greeting, Reply, SentDefinition
from distribax.coordinator.pickling import FunctionCatalogue, dump_arguments
from distribax.coordinator.worker import Worker
from distribax.coordinator.worker_handle import WorkerHandle
from distribax.execution import named_objects
from distribax.testing.local_servers import LocalServersStrategy, local_servers

ROOT = pathlib.Path(dx.__file__).parent
WALK = ("coordinator", "execution", "data", "parameter_server")
"""In this order; see "The walk of a scheduled function" in docs/architecture.md."""


class Setup:
    """Gives the worker the strategy of this process."""

    strategy: LocalServersStrategy

    def start(self, worker_index: int) -> Setup:
        return self

    def scope(self) -> contextlib.AbstractContextManager[object]:
        return Setup.strategy.scope()

    def flush(self) -> None:
        Setup.strategy.source.client.flush()


class Calls:
    """Records which folder calls which, in this thread, while it is entered."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        callee = _folder(frame) if event == "call" else None
        above = frame.f_back
        while callee is not None and above is not None:
            caller = _folder(above)
            if caller is not None:
                if caller != callee:
                    self.seen.add((caller, callee))
                return
            above = above.f_back


def _folder(frame: FrameType) -> str | None:
    """Returns the folder of the library that a call is in, or None."""
    path = pathlib.Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else None


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServersStrategy]:
    monkeypatch.setattr(references, "_lookup", None)
    monkeypatch.setattr(worker, "_worker_index", None)
    with local_servers() as made:
        monkeypatch.setattr(Setup, "strategy", made, raising=False)
        yield made


def test_a_step_goes_down_through_four_folders(strategy: LocalServersStrategy) -> None:
    with strategy.scope():
        weights = dx.Variable(np.zeros(3, np.float32))
        optimizer = dx.Optimizer(optax.sgd(0.1))

    @dx.function
    def step(iterator: Any) -> Any:
        def replica_step(x: Any) -> Any:
            loss, grads = dx.value_and_grad(
                lambda: jnp.sum((weights.value() - x) ** 2), [weights]
            )()
            optimizer.apply_gradients(zip(grads, [weights], strict=True))
            return loss

        return strategy.run(replica_step, args=(next(iterator),))

    dataset = dx.data.Dataset.from_tensor_slices(np.ones((4, 3), np.float32)).repeat()
    iterator = iter(PerWorkerDataset(dataset, lambda dataset: None))
    with named_objects.pickle_for(strategy):
        function = FunctionCatalogue().define(step)
        arguments, needs = dump_arguments(step, (iterator,), {})
    definitions: list[SentDefinition] = []
    for definition in (function, *(need.definition for need in needs)):
        WorkerHandle(0, {}, b"")._add_definitions(definition, definitions)
    actor = Worker()
    greeting = actor.start(0, pickle.dumps(Setup()))
    assert isinstance(greeting, Greeting)

    def run(number: int) -> float:
        batch = ClosureBatch(
            number, greeting.boot, tuple(definitions), (), [function.number], [arguments]
        )
        reply: Reply = pickle.loads(actor.run(pickle.dumps(batch)))
        return float(reply.outcomes[0])

    losses = [run(1), run(2)]
    with Calls() as calls:
        losses.append(run(3))
    assert losses == sorted(losses, reverse=True)
    between = {call for call in calls.seen if call[0] in WALK and call[1] in WALK}
    assert {("coordinator", "execution"), ("execution", "data"), ("execution", WALK[3])} <= between
    assert [(a, b) for a, b in between if WALK.index(a) > WALK.index(b)] == []
    # The others answer a question, and never lead back to one of the four; but for the scope, which
    # asks whether the program has imported a library that needs an adapter.
    back = {(a, b) for a, b in calls.seen if a not in WALK and b in WALK}
    assert back <= {("strategies", "execution")}

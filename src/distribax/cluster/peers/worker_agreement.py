"""What workers tell each other while programs run: values, failures, whether they agree."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from distribax import contracts, jax_private

_Result = TypeVar("_Result")

_numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class WorkerAgreement:
    """Lets workers exchange small values, in any thread and without the devices.

    All workers create their agreements on a topic in the same order, and all make the same calls
    of one agreement in the same order. What takes part in a step goes over the devices instead
    (`jax_private.gather_from_all` and its siblings), which is faster with many workers.

    Args:
        topic: What the agreement is about; part of the message if a worker does not answer.
        num_workers: How many workers take part; a single one answers itself.
        worker_id: Which of them this process is.
        timeout_seconds: How long to wait for the others in each call.
    """

    def __init__(
        self,
        topic: str,
        num_workers: int = 1,
        worker_id: int = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(
                f"timeout_seconds={timeout_seconds} is not positive. Expected how long to wait for "
                "the other workers, in seconds."
            )
        self.num_workers = num_workers
        self.worker_id = worker_id
        self._timeout_seconds = timeout_seconds
        number = next(_numbers[topic]) if num_workers > 1 else 0
        self._key = f"distribax/{topic}/{number}"
        self._num_exchanges = 0
        self._last_key: str | None = None

    @classmethod
    def of_targets(
        cls, topic: str, targets: Iterable[contracts.InputTarget], timeout_seconds: float
    ) -> WorkerAgreement:
        """Returns an agreement of all workers that any of `targets` is shared by."""
        widest = max(targets, key=lambda target: target.num_workers)
        return cls(topic, widest.num_workers, widest.worker_id, timeout_seconds)

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that acts where one does it for all."""
        return self.worker_id == 0

    def exchange(self, what: str, own: object) -> list[Any]:
        """Returns what every worker passed as `own` (JSON-able data), in the order of workers."""
        if self.num_workers == 1:
            return [own]
        key = f"{self._key}/{self._num_exchanges}/{what}"
        self._num_exchanges += 1
        texts = jax_private.exchange_text(key, json.dumps(own), self._timeout_seconds)
        if self._last_key is not None:
            # Everyone has come to this exchange, so nobody needs the texts of the one before.
            jax_private.forget_text(self._last_key)
        self._last_key = key
        return [json.loads(text) for text in texts]

    def run_together(self, what: str, fn: Callable[[], _Result]) -> _Result:
        """Returns what `fn` returns in this worker; if it raises in one worker, all raise."""
        try:
            result = fn()
        except Exception as error:
            self.exchange(what, f"{type(error).__name__}: {error}")
            raise
        for worker_id, failure in enumerate(self.exchange(what, None)):
            if failure is not None:
                raise RuntimeError(f"{what}: worker {worker_id} failed: {failure}")
        return result

    def require_same(self, what: str, own: object) -> None:
        """Raises ValueError in every worker unless all pass the same `own`."""
        said = self.exchange(what, own)
        for worker_id, other in enumerate(said):
            if other != said[0]:
                raise ValueError(
                    f"{what}: the workers differ. Worker 0 has {said[0]!r}, worker {worker_id} has "
                    f"{other!r}. All workers run the same program with the same arguments."
                )

"""The workers that save and restore together, and how they learn of each other's failures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from distribax import jax_private
from distribax.topology import InputTarget

_Result = TypeVar("_Result")

# All workers take the same steps in the same order, so that the numbers agree.
_numbers = itertools.count()


@dataclass(frozen=True)
class Team:
    """Which of how many workers this process is, when it acts together with the others."""

    num_workers: int = 1
    worker_id: int = 0
    timeout_seconds: float = 600.0

    @classmethod
    def of(cls, targets: Iterable[InputTarget], timeout_seconds: float) -> Team:
        """Returns the workers that share what `targets` feed."""
        if not timeout_seconds > 0:
            raise ValueError(
                f"timeout_seconds={timeout_seconds} is not positive. Expected how long to wait for "
                "the other workers, in seconds."
            )
        widest = max(targets, key=lambda target: target.num_workers)
        return cls(widest.num_workers, widest.worker_id, timeout_seconds)

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that writes."""
        return self.worker_id == 0

    def all_say(self, what: str, own: Any) -> list[Any]:
        """Returns what every worker says (JSON-able data), in their order; all must call it."""
        if self.num_workers == 1:
            return [own]
        key = f"distribax/team/{next(_numbers)}/{what}"
        texts = jax_private.exchange_text(key, json.dumps(own), self.timeout_seconds)
        return [json.loads(text) for text in texts]

    def together(self, what: str, fn: Callable[[], _Result]) -> _Result:
        """Runs `fn` in every worker; where it failed in one, all raise."""
        if self.num_workers == 1:
            return fn()
        result, error = None, None
        try:
            result = fn()
        except Exception as caught:  # Raised again, once the others know.
            error = caught
        said = self.all_say(what, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for worker_id, failure in enumerate(said):
            if failure is not None:
                raise RuntimeError(f"{what}: worker {worker_id} failed: {failure}")
        return result  # type: ignore[return-value]

    def must_match(self, what: str, own: Any) -> None:
        """Raises in every worker unless all say the same."""
        said = self.all_say(what, own)
        for worker_id, other in enumerate(said):
            if other != said[0]:
                raise ValueError(
                    f"{what}: the workers differ. Worker 0 has {said[0]!r}, worker {worker_id} has "
                    f"{other!r}. All workers run the same program with the same arguments."
                )

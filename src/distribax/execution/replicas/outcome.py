"""What the replicas of a compiled run return: objects known from the trace, and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from distribax import contracts
from distribax.execution.programs.results import Held, Part
from distribax.topology import REPLICA_AXIS

SPLIT = PartitionSpec(REPLICA_AXIS)
SAME = PartitionSpec()


@dataclass(frozen=True)
class Outcome:
    """What the replicas' code has returned.

    Attributes:
        tree: The structure of what a replica returns.
        plan: The parts in it; an array that is one value for all replicas has no form.
        written: The variables that it has written.
        outputs: The arrays of the program: those of the parts, and the variables' new values.
    """

    tree: Any
    plan: list[Part]
    written: list[contracts.State]
    outputs: list[Any]

    @property
    def specs(self) -> list[PartitionSpec]:
        """How the arrays are spread over the mesh."""
        parts = [part for part in self.plan if not isinstance(part, Held)]
        return [
            *(SAME if part is None or part.mirrored else SPLIT for part in parts),
            *(SPLIT if variable.per_replica else SAME for variable in self.written),
        ]

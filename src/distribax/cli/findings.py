"""What the doctor finds: one fact each, how it is judged, and what mends it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(enum.Enum):
    """How a fact is judged."""

    OK = "ok"
    WARNING = "warning"  # Something that only some programs need is missing or odd.
    PROBLEM = "problem"  # Programs will fail.


@dataclass(frozen=True)
class Finding:
    """A fact about this machine, and what mends it if it is not as it should be."""

    area: str
    subject: str
    value: str
    verdict: Verdict = Verdict.OK
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.verdict is not Verdict.OK), "a fix for whatever is not ok"

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding as JSON has it."""
        return asdict(self) | {"verdict": self.verdict.value}


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Returns whether there is no problem; warnings are none."""
    return all(finding.verdict is not Verdict.PROBLEM for finding in findings)

"""The findings of the doctor: facts about this machine, and how to fix what is wrong."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass


class Verdict(enum.Enum):
    """Whether a fact is a problem."""

    OK = "ok"
    WARNING = "warning"  # Something that only some programs need is missing or odd.
    PROBLEM = "problem"  # Programs will fail.


@dataclass(frozen=True)
class Finding:
    """A fact about this machine.

    Attributes:
        area: What it belongs to, such as "network".
        subject: What was examined.
        value: What was found.
        verdict: Whether it is a problem.
        fix: How to fix it; empty if it is not a problem.
    """

    area: str
    subject: str
    value: str
    verdict: Verdict = Verdict.OK
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.verdict is not Verdict.OK), "only what is not ok has a fix"

    def as_dict(self) -> dict[str, str]:
        """Returns the finding as a JSON object."""
        return asdict(self) | {"verdict": self.verdict.value}


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Returns whether there is no problem; warnings do not count."""
    return all(finding.verdict is not Verdict.PROBLEM for finding in findings)

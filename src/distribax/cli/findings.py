"""The findings of the doctor: facts about this machine, and how to fix what is wrong."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
        fix: How to fix it; empty if nothing is wrong.
        is_problem: Whether programs fail until it is fixed.
    """

    area: str
    subject: str
    value: str
    fix: str = ""
    is_problem: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether it is a problem."""
        if not self.fix:
            return Verdict.OK
        return Verdict.PROBLEM if self.is_problem else Verdict.WARNING

    def as_dict(self) -> dict[str, str]:
        """Returns the finding as a JSON object."""
        return {
            "area": self.area,
            "subject": self.subject,
            "value": self.value,
            "verdict": self.verdict.value,
            "fix": self.fix,
        }

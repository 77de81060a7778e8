"""Version ranges: whether an installed version is in the range that a package requires.

>>> is_in_range("0.10.2", "<0.11,>=0.10.2"), is_in_range("0.11.0", "<0.11,>=0.10.2")
(True, False)
>>> parse_requirement('flax>=0.12; extra == "flax"')
Requirement(name='flax', range='>=0.12', extra='flax')
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?(?P<range>[^;)]*)\)?"
    r"(?:;.*?extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?"
)
_CLAUSE: Final = re.compile(r"(>=|<=|==|!=|<|>)\s*([\d.]+)")
_Version = tuple[int, ...]
_COMPARISONS: Final[dict[str, Callable[[_Version, _Version], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Requirement:
    """A package that distribax, or one of its extras, requires."""

    name: str
    range: str
    extra: str | None


def parse_requirement(text: str) -> Requirement:
    """Returns what a line of a package's requirements says."""
    match = _REQUIREMENT.match(text)
    assert match is not None, text
    return Requirement(match["name"], match["range"].strip(), match["extra"])


def is_in_range(version: str, wanted: str) -> bool:
    """Returns whether a version is in the range; only its leading numbers are compared."""
    clauses = _CLAUSE.findall(wanted)
    return all(_compare(version, symbol, limit) for symbol, limit in clauses)


def _compare(version: str, symbol: str, limit: str) -> bool:
    pairs = itertools.zip_longest(_parse_numbers(version), _parse_numbers(limit), fillvalue=0)
    left, right = zip(*pairs, strict=True)
    return _COMPARISONS[symbol](left, right)


def _parse_numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else [0]

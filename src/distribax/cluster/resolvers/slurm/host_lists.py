"""Slurm's short forms for lists of hosts and numbers."""

from __future__ import annotations

import itertools
import re
from typing import Final

_MAX_HOSTS: Final = 65536
"""As many as Slurm itself allows; more must be a typing error."""


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the hosts of a Slurm host list, in its order.

    >>> expand_hostlist("node[1-3,7],x,rack[0-1]n[08-09]")
    ['node1', 'node2', 'node3', 'node7', 'x', 'rack0n08', 'rack0n09', 'rack1n08', 'rack1n09']
    """
    hosts: list[str] = []
    # Commas inside brackets belong to the ranges there.
    for part in re.split(r",(?![^\[]*\])", hostlist):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        texts = [
            _expand_ranges(piece, hostlist) if i % 2 else [piece] for i, piece in enumerate(pieces)
        ]
        stray = any(c in "[]" or c.isspace() for piece in pieces[::2] for c in piece)
        if stray or not any(pieces):
            raise ValueError(
                f"Invalid host list {hostlist!r}: {part!r} is not a host. Expected names and "
                "ranges, such as 'node[1-3,7],x'."
            )
        hosts.extend(
            "".join(combination)
            for combination in itertools.islice(itertools.product(*texts), _MAX_HOSTS + 1)
        )
        if len(hosts) > _MAX_HOSTS:
            raise ValueError(f"Invalid host list {hostlist!r}: more than {_MAX_HOSTS} hosts.")
    return hosts


def _expand_ranges(ranges: str, hostlist: str) -> list[str]:
    """Returns the numbers in '1-3,07' as text, with leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise ValueError(
                f"Invalid host list {hostlist!r}: {part!r} is not a range. Expected a number, or "
                "two with '-' between them."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_HOSTS:
            raise ValueError(
                f"Invalid host list {hostlist!r}: {part!r} must go up, by less than {_MAX_HOSTS}."
            )
        numbers.extend(str(i).zfill(len(match[1])) for i in range(first, last + 1))
    return numbers


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the numbers of a list in which 3(x2) means 3,3.

    >>> expand_tasks_per_node("3(x2),2,1")
    [3, 3, 2, 1]
    """
    numbers: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise ValueError(
                f"Invalid tasks-per-node list {tasks_per_node!r}: {part!r} is not a number. "
                "Expected numbers and repeats, such as '3(x2),2,1'."
            )
        numbers.extend([int(match[1])] * int(match[2] or 1))
    return numbers

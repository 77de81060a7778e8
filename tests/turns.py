"""Cases in turn: a function has some of all combinations, and all functions together have all."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environment import COMPLETE

MODE = "compiled"
"""The parameter that says whether a step runs inside `dx.function`."""


def get_params(item: pytest.Item) -> dict[str, Any]:
    """Returns the parameters of a case by name, none if it has none."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def is_its_turn(item: pytest.Item, parameter: str, offset: int = 0) -> bool:
    """Returns whether a case has the mode that is its turn.

    Args:
        item: A case with a mode.
        parameter: What the modes take turns for: its value does not count.
        offset: 0 or 1; values of this parameter with different offsets have different modes.
    """
    params = get_params(item)
    indices: dict[str, int] = getattr(item, "callspec").indices  # noqa: B009
    others = sorted(set(params) - {MODE, parameter})
    # A number that stays when other tests come and go.
    name = [item.nodeid.partition("[")[0], *(f"{other} {indices[other]}" for other in others)]
    turn = zlib.crc32(" ".join(name).encode()) + offset
    return (turn + (params[MODE] in (True, "compiled"))) % 2 == 0


def leave_out(
    config: pytest.Config,
    items: list[pytest.Item],
    folder: Path,
    is_left_out: Callable[[pytest.Item], bool],
) -> None:
    """Leaves out some cases of a folder, unless all are asked for."""
    if COMPLETE:
        return
    left_out = {item for item in items if item.path.is_relative_to(folder) and is_left_out(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]

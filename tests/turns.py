"""Cases in turn: a function has some of all combinations, and all functions together have all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.environment import COMPLETE

MODE = "compiled"
"""The parameter that says whether a step runs inside `dx.function`."""

_NUM_EVERYWHERE = 2
"""So many arguments of a function are tried on all strategies, and among workers."""


def get_params(item: pytest.Item) -> dict[str, Any]:
    """Returns the parameters of a case by name, none if it has none."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def describe_rest(item: pytest.Item, *without: str) -> str:
    """Returns what the name of a case says of its parameters, but for the mode and some others.

    Args:
        item: A case.
        *without: Parameters whose values are not to be in it.
    """
    params = get_params(item)
    words = item.nodeid.partition("[")[2].removesuffix("]").split("-")
    for name in without:
        value = params[name]
        short = "".join(map(str, value)) if isinstance(value, tuple) else ""
        for word in {str(value), short} & set(words):
            words.remove(word)
    return "-".join(word for word in words if word not in ("eager", "compiled"))


def find_late_arguments(
    items: Iterable[pytest.Item], find_setup: Callable[[pytest.Item], str]
) -> set[pytest.Item]:
    """Returns the cases of functions with the third of their arguments, or a later one.

    Args:
        items: Cases, all of those of a function.
        find_setup: Returns the parameter that is the strategy, which does not count; empty if none.
    """
    seen: dict[str, list[str]] = {}
    late = set()
    for item in items:
        setup = find_setup(item)
        arguments = seen.setdefault(item.nodeid.partition("[")[0], [])
        own = describe_rest(item, *([setup] if setup else []))
        if own not in arguments:
            arguments.append(own)
        if arguments.index(own) >= _NUM_EVERYWHERE:
            late.add(item)
    return late


def get_turn(item: pytest.Item, *without: str) -> int:
    """Returns a number for a function and its parameters, which stays when other tests come and go.

    Args:
        item: A case.
        *without: Parameters that take turns: their values do not count, and nor does the mode.
    """
    name = f"{item.nodeid.partition('[')[0]} {describe_rest(item, *without)}"
    return zlib.crc32(name.encode())


def is_its_turn(item: pytest.Item, parameter: str, offset: int = 0) -> bool:
    """Returns whether a case has the mode that is its turn.

    Args:
        item: A case with a mode.
        parameter: What the modes take turns for: its value does not count.
        offset: 0 or 1; values of this parameter with different offsets have different modes.
    """
    is_compiled = get_params(item)[MODE] in (True, "compiled")
    return (get_turn(item, parameter) + offset + is_compiled) % 2 == 0


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

"""Leaves out cases that would tell nothing new, unless all are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import turns
from tests.multidevice.contract.other_workers import TOGETHER

_OFFSETS = {"default": 0, "one_device": 1, "served": 0, "central": 1, "mirrored": 0}
"""Strategies with different offsets are tried in different modes."""

_ALIKE = ("default", "one_device")
"""Strategies that share all of their code."""

_ALL_KINDS = frozenset({"case", "compiled_case", "strategy"})
"""The fixtures of the contract with all strategies."""

_WITH_MIRRORED = _ALL_KINDS | {"scoped", "small", "several", "eager", "mirrored"}
"""Those with several mirrored replicas."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves every function both modes on several mirrored replicas, and one on others, in turn.

    A mode decides how replicas run and whether variables are arguments of a program. Mirrored
    replicas go all of these ways in both modes. The default strategy and OneDeviceStrategy share
    their code, so they take turns; central storage runs its replicas as mirrored ones, and differs
    from them in where variables are; variables on servers are pulled and pushed around a program as
    around an eager step. These two have one mode: of all functions, one half tries a strategy eager
    and the other half compiled.

    A function with a list of arguments tries two of them on all strategies. That shows that the
    strategies do the same; the rest of the list is tried on mirrored replicas, in one mode.
    """
    if TOGETHER:
        return
    folder = Path(__file__).parent
    with_mirrored = [item for item in items if _find_setup(item) in _WITH_MIRRORED]
    late = turns.find_late_arguments(with_mirrored, _find_setup)
    turns.leave_out(config, items, folder, lambda item: _is_left_out(item, item in late))


def _is_left_out(item: pytest.Item, is_late: bool) -> bool:
    fixture = _find_setup(item)
    if not fixture:
        return False
    kind, num_replicas = turns.get_params(item)[fixture]
    is_mirrored = kind == "mirrored" and num_replicas > 1
    if is_late:
        return not is_mirrored or _is_not_its_turn(item, fixture, kind)
    # The second bit: the first one decides on the mode.
    whose_turn = _ALIKE[turns.get_turn(item, fixture) // 2 % 2]
    if fixture in _ALL_KINDS and kind in _ALIKE and kind != whose_turn:
        return True
    return not is_mirrored and _is_not_its_turn(item, fixture, kind)


def _find_setup(item: pytest.Item) -> str:
    """Returns the parameter that is a strategy and its size; empty if there are none or several."""
    setups = [name for name, value in turns.get_params(item).items() if _is_setup(value)]
    return setups[0] if len(setups) == 1 else ""


def _is_not_its_turn(item: pytest.Item, fixture: str, kind: str) -> bool:
    if turns.MODE not in turns.get_params(item):
        return False
    return not turns.is_its_turn(item, fixture, _OFFSETS[kind])


def _is_setup(value: object) -> bool:
    """Returns whether a parameter is the kind of a strategy and its number of replicas."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], str) and value[0] in _OFFSETS

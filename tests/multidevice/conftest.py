"""Leaves out cases that would tell nothing new, unless all are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import turns
from tests.multidevice.contract.other_workers import TOGETHER

_OFFSETS = {"default": 0, "one_device": 1, "served": 0, "central": 1, "mirrored": 0}
"""Strategies with different offsets are tried in different modes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves every function both modes on several mirrored replicas, and one on others, in turn.

    A mode decides how replicas run and whether variables are arguments of a program. Mirrored
    replicas go all of these ways in both modes. The default strategy and OneDeviceStrategy share
    their code, so they are one eager and one compiled; central storage runs its replicas as
    mirrored ones, and differs from them in where variables are; variables on servers are pulled and
    pushed around a program as around an eager step. These two take turns likewise: of all
    functions, one half tries a strategy eager and the other half compiled.
    """
    if not TOGETHER:
        turns.leave_out(config, items, Path(__file__).parent, _is_left_out)


def _is_left_out(item: pytest.Item) -> bool:
    params = turns.get_params(item)
    setups = [name for name, value in params.items() if _is_setup(value)]
    if turns.MODE not in params or len(setups) != 1:
        return False
    kind, num_replicas = params[setups[0]]
    if kind == "mirrored" and num_replicas > 1:
        return False
    return not turns.is_its_turn(item, setups[0], _OFFSETS[kind])


def _is_setup(value: object) -> bool:
    """Returns whether a parameter is the kind of a strategy and its number of replicas."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], str) and value[0] in _OFFSETS

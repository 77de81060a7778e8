"""The strategy that is current when no other is: it leaves everything as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

from typing_extensions import override

from distribax import context
from distribax.strategies.one_device import InlineRunner, SingleExtended
from distribax.strategies.strategy import Strategy
from distribax.variables import Variable


class _DefaultExtended(SingleExtended):
    def __init__(self) -> None:
        super().__init__(None)

    @override
    def non_slot_devices(self, var_list: Sequence[Variable]) -> object:
        """Returns the first variable by name; what belongs to none goes beside it."""
        if not var_list:
            raise ValueError(
                "non_slot_devices: var_list is empty. The default strategy puts non-slot "
                "variables beside the variables being optimized; pass those."
            )
        return min(var_list, key=lambda variable: variable.name)


class DefaultStrategy(Strategy):
    """Ordinary behaviour: one replica, no placement."""

    def __init__(self) -> None:
        super().__init__(_DefaultExtended())

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Every process has its own, and it is always the same one.
        return _get_default, ()


def _get_default() -> DefaultStrategy:
    return _default


_default = DefaultStrategy()
context.register_default(_default, context.ReplicaContext(_default, InlineRunner(_default)))

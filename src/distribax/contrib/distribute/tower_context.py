"""What a tower can ask and do, and which context the code is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from distribax import context
from distribax.contrib.distribute.strategy import DistributionStrategy, view
from distribax.strategies import Strategy, get_strategy


class TowerContext:
    """The `DistributionStrategy` interface inside a tower; made by `get_tower_context()`.

    Args:
        replica_context: The replica that the tower is.

    Raises:
        TypeError: `replica_context` is not a `dx.ReplicaContext`.
    """

    def __init__(self, replica_context: context.ReplicaContext) -> None:
        if not isinstance(replica_context, context.ReplicaContext):
            raise TypeError(
                f"TowerContext: replica_context={replica_context!r} is not a dx.ReplicaContext. "
                "Ask get_tower_context() inside the function given to call_for_each_tower()."
            )
        self._replica = replica_context

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The current strategy."""
        return view(self._replica.strategy)

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower."""
        return self.distribution_strategy.is_single_tower

    @property
    def num_towers(self) -> int:
        """The number of towers."""
        return self._replica.num_replicas_in_sync

    @property
    def tower_id(self) -> Any:
        """The index of this tower: an int, or an int32 scalar while `dx.function` compiles."""
        return self._replica.replica_id_in_sync_group

    @property
    def device(self) -> str:
        """The name of the device that this tower runs on.

        Raises:
            RuntimeError: A compiled step runs as one program on all towers' devices.
        """
        devices = self._replica.devices
        if len(devices) == 1:
            return devices[0]
        raise RuntimeError(
            "TowerContext.device: a compiled step is one program for all towers, so none of "
            f"{list(devices)} is its device. Use tower_id, which is computed when the program "
            "runs, or call call_for_each_tower() outside of dx.function."
        )

    def merge_call(self, merge_fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Meets the other towers, and runs `merge_fn(distribution, *args)` once for all of them.

        Args:
            merge_fn: A function that takes the strategy first.
            *args: Its further arguments; each reaches it as the values of all towers.
            **kwargs: Its keyword arguments, treated in the same way.

        Returns:
            The tower's own part of what `merge_fn` returns.

        Raises:
            TypeError: `merge_fn` is not callable.
        """
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call: merge_fn={merge_fn!r} is not callable. Expected a function that "
                "takes the strategy first: lambda distribution, x: distribution.reduce('sum', x)."
            )
        return self._replica.merge_call(_MergeFn(merge_fn), args, kwargs)

    def __enter__(self) -> TowerContext:
        self._replica.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._replica.__exit__(*exc_info)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, TowerContext) and other._replica is self._replica

    @override
    def __hash__(self) -> int:
        return hash(self._replica)

    @override
    def __repr__(self) -> str:
        return f"<TowerContext of {self.distribution_strategy!r}>"


class _MergeFn:
    """Gives a tower's merge function the strategy as it knows it.

    Two are equal if they are of the same code: so the engine sees whether all towers have met in
    the same call.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._code = getattr(fn, "__code__", fn)

    def __call__(self, strategy: Strategy, *args: object, **kwargs: object) -> Any:
        return self._fn(view(strategy), *args, **kwargs)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MergeFn) and other._code == self._code

    @override
    def __hash__(self) -> int:
        return hash(self._code)


def get_tower_context() -> TowerContext | None:
    """Returns the context of the tower that runs now, or None in a cross-tower context.

    A program starts in the only tower of the default strategy.

    Example:
        >>> from distribax.contrib import distribute
        >>> distribute.get_tower_context().is_single_tower
        True
    """
    replica = context.get_replica_context()
    return None if replica is None else TowerContext(replica)


def get_cross_tower_context() -> DistributionStrategy | None:
    """Returns the current strategy in a cross-tower context, and None in a tower."""
    return get_distribution_strategy() if context.in_cross_replica_context() else None


def get_distribution_strategy() -> DistributionStrategy:
    """Returns the current strategy; a default one when none is in scope."""
    return view(get_strategy())


def has_distribution_strategy() -> bool:
    """Tells whether a strategy other than the default one is current."""
    return context.has_strategy()

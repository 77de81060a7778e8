"""One replica on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.collectives import CommunicationOptions, ReductionToOneDevice
from distribax.execution import frames
from distribax.strategies.extended import StrategyExtended
from distribax.strategies.strategy import Strategy
from distribax.topology import InputTarget, Renew, resolve_device
from distribax.types import ReduceOp, ValueContext, VariableSynchronization
from distribax.values import Mirrored, is_opaque, nests, select
from distribax.variables import Placement, Single


class InlineRunner(contracts.Runner):
    """The meeting points of the only replica: it is always alone."""

    compiles = True
    replica_id = 0
    copy_id = 0
    is_idle = False

    def __init__(self, strategy: contracts.Strategy) -> None:
        self.strategy = strategy

    @override
    def merge(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with context.enter(context.Entry(self.strategy)):
            result = fn(self.strategy, *args, **kwargs)
        return select(result, 0)

    @override
    def all_reduce(
        self, op: ReduceOp, leaves: list[jax.Array], options: CommunicationOptions | None
    ) -> list[jax.Array]:
        return [jax.numpy.asarray(leaf) for leaf in leaves]

    @override
    def all_gather(
        self, leaves: list[jax.Array], axis: int, options: CommunicationOptions | None
    ) -> list[jax.Array]:
        return [jax.numpy.asarray(leaf) for leaf in leaves]


class SingleExtended(StrategyExtended):
    """Runs the one replica in the caller's thread, on `device` or wherever JAX puts it."""

    single = True

    def __init__(self, device: jax.Device | None) -> None:
        self._device = device
        super().__init__(() if device is None else (device,), (), ReductionToOneDevice())

    @override
    def renew_devices(self, renew: Renew) -> None:
        super().renew_devices(renew)
        self._device = None if self._device is None else renew(self._device)

    @property
    @override
    def worker_devices(self) -> tuple[str, ...]:
        self._workers = self._workers or Single(None).devices
        return super().worker_devices

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    @property
    @override
    def num_replicas_in_sync(self) -> int:
        return 1

    @override
    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        replica = context.ReplicaContext(self.strategy, InlineRunner(self.strategy))
        frame = frames.current()
        if frame is not None:
            frame.function.device = self._device
        else:
            args, kwargs = self._put_on_device((tuple(args), dict(kwargs)))
        args, kwargs = select((tuple(args), dict(kwargs)), 0, num_replicas=1)
        with context.enter(context.Entry(self.strategy, replica)), self._enter_device():
            return fn(*args, **kwargs)

    @override
    def input_target(self) -> InputTarget:
        return InputTarget((self._device,), None, 1)

    def _enter_device(self) -> AbstractContextManager[None]:
        return jax.default_device(self._device or jax_private.get_default_device())

    def _put_on_device(self, nest: object) -> Any:
        device = self._device
        if device is None:
            return nest
        return nests.map_leaves(
            lambda leaf: jax_private.move_to_device(leaf, device), nest, is_opaque
        )

    @override
    def _placement(self, synchronization: VariableSynchronization, name: str) -> Placement:
        return Single(self._device)

    @override
    def _update_copies(
        self, devices: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        args, kwargs = select((tuple(args), dict(kwargs)), 0)
        with context.enter(context.Entry(self.strategy, copy_id=0)), self._enter_device():
            return [fn(*args, **kwargs)]

    @override
    def distribute_values(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext())

    @override
    def reduce_all(
        self, reduce_op: ReduceOp, values: Sequence[object], options: CommunicationOptions | None
    ) -> list[Any]:
        reduced = super().reduce_all(reduce_op, values, options)
        return [value.get() if isinstance(value, Mirrored) else value for value in reduced]


class OneDeviceStrategy(Strategy):
    """Runs everything on one device; useful to try code before it is distributed.

    Args:
        device: The device's name, for example "GPU:0", or a `jax.Device`.

    Raises:
        ValueError: There is no such device.

    Example:
        >>> import distribax as dx
        >>> strategy = dx.OneDeviceStrategy("CPU:0")
        >>> float(strategy.run(lambda x: x + 1, args=(2.0,)))
        3.0
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(SingleExtended(resolve_device(device)))

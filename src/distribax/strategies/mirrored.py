"""Replicas on several devices of one machine, with mirrored variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import context, jax_private
from distribax.collectives import AllReduce, CrossDeviceOps
from distribax.execution import frames, run_in_program, run_in_threads
from distribax.strategies.extended import StrategyExtended
from distribax.strategies.strategy import Strategy
from distribax.topology import (
    check_cpu_pool,
    list_local_devices,
    make_replica_mesh,
    resolve_devices,
)
from distribax.types import ValueContext, VariableSynchronization
from distribax.values import (
    Local,
    Mirrored,
    is_wrapped,
    is_wrapped_or_opaque,
    nests,
    regroup,
)
from distribax.variables import Placement, Replicated, Stacked, Variable


class MirroredExtended(StrategyExtended):
    """Runs replicas as one SPMD program in `dx.function`, and in threads outside of it."""

    def __init__(self, devices: Sequence[jax.Device], cross_device_ops: CrossDeviceOps) -> None:
        mesh = make_replica_mesh(tuple(devices))
        check_cpu_pool(list_local_devices(mesh))
        super().__init__(devices, devices, cross_device_ops, mesh)

    @override
    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        assert self.mesh is not None
        if frames.current() is not None:
            return run_in_program(self.strategy, self.mesh, self._ops, fn, args, kwargs)
        return run_in_threads(self.strategy, fn, args, kwargs)

    @override
    def _placement(self, synchronization: VariableSynchronization, name: str) -> Placement:
        assert self.mesh is not None
        if synchronization is VariableSynchronization.ON_READ:
            return Stacked(self.mesh)
        return Replicated(self.mesh)

    @override
    def _update_copies(
        self, devices: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        if frames.current() is not None:
            return [self._update_in_program(fn, args, kwargs)] * devices
        results = []
        for index, device in enumerate(self._copy_devices(devices)):
            own_args, own_kwargs = _take_part((tuple(args), dict(kwargs)), index, device)
            entry = context.Entry(self.strategy, copy_id=index)
            with context.enter(entry), jax.default_device(device):
                results.append(fn(*own_args, **own_kwargs))
        return results

    def _copy_devices(self, count: int) -> tuple[jax.Device, ...]:
        return self._parameters[:count]

    def _update_in_program(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Updates all copies at once: inside the program they are one value."""
        assert self.mesh is not None
        frame = frames.current()
        if not isinstance(frame, frames.RunFrame):
            touches_stacked = any(isinstance(arg, Variable) and arg.per_replica for arg in args)
            if touches_stacked:
                return run_in_program(
                    self.strategy, self.mesh, self._ops, self._wrap_as_copy(fn), args, kwargs
                )
        own = nests.map_leaves(_unwrap, (tuple(args), dict(kwargs)), is_wrapped_or_opaque)
        return self._wrap_as_copy(fn)(*own[0], **own[1])

    def _wrap_as_copy(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            with context.enter(context.Entry(self.strategy, copy_id=0)):
                return fn(*args, **kwargs)

        return call

    @override
    def distribute_values(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        values = []
        for index, device in enumerate(self.local_devices):
            with jax.default_device(device):
                made = value_fn(ValueContext(self.first_replica + index, self.num_replicas_in_sync))
                values.append(nests.map_leaves(_put_on_default_device, made, of_results=True))
        return regroup(values, wrap=True, mesh=self.mesh)


def _unwrap(leaf: object) -> Any:
    if isinstance(leaf, Mirrored):
        return leaf.get()
    if is_wrapped(leaf) and isinstance(leaf.layout, Local):
        return leaf.layout.value
    return leaf


def _put_on_default_device(leaf: object) -> object:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _take_part(nest: object, index: int, device: jax.Device) -> Any:
    def own(leaf: object) -> object:
        own_part = leaf.part(index) if is_wrapped(leaf) else leaf
        return jax_private.move_to_device(own_part, device)

    return nests.map_leaves(own, nest, is_wrapped_or_opaque)


class MirroredStrategy(Strategy):
    """Trains synchronously on several devices of one machine.

    Each variable has a copy on every device, kept the same by applying the same updates.

    Args:
        devices: Names or `jax.Device`s; all GPUs (or TPUs) by default, else all CPU devices. Named
            CPU devices that do not exist yet are made, as long as JAX has not started.
        cross_device_ops: The algorithm that combines values; `AllReduce()` by default.

    Raises:
        TypeError: `cross_device_ops` is not an instance of `CrossDeviceOps`.
        ValueError: A device's name is not known, or two devices are the same.
        RuntimeError: More CPU devices are asked for than JAX has started with.

    Example:
        >>> import distribax as dx
        >>> strategy = dx.MirroredStrategy(["CPU:0"])
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                f"{type(self).__name__}: cross_device_ops={cross_device_ops!r} is not a "
                "CrossDeviceOps. Pass an instance, for example dx.ReductionToOneDevice()."
            )
        super().__init__(
            MirroredExtended(resolve_devices(devices), cross_device_ops or AllReduce())
        )

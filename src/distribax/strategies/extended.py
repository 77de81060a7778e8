"""`StrategyExtended`: the interface for algorithms that know about distribution."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distribax import context, contracts
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.collectives.cross_device_ops import resolve_destinations
from distribax.execution import frames, run_replicas
from distribax.strategies import reduction
from distribax.topology import InputTarget, Renew, device_name, follow, make_replica_mesh
from distribax.types import ReduceOp, ValueContext, VariableSynchronization
from distribax.values import DistributedValues, is_wrapped
from distribax.variables import ShardedVariable, Single, Variable, VariableCopy
from distribax.variables.creation import colocate, get_colocated


class StrategyExtended:
    """How a strategy places variables, runs replicas and combines their values.

    To write a strategy, subclass it, override `_run_replicas`, `_placement` and `_update_copies`
    (and the devices), and give an instance to `Strategy`.

    Args:
        worker_devices: The devices that run replicas.
        parameter_devices: The devices that hold variables.
        cross_device_ops: The algorithm that combines values of different devices.
        mesh: The mesh that the replicas live on; None for one replica.
    """

    single = False  # What it and the next one mean is said in `contracts.Extended`.
    source: contracts.Source | None = None

    def __init__(
        self,
        worker_devices: Sequence[jax.Device],
        parameter_devices: Sequence[jax.Device],
        cross_device_ops: CrossDeviceOps,
        mesh: Mesh | None = None,
    ) -> None:
        self._workers = tuple(worker_devices)
        self._parameters = tuple(parameter_devices)
        self._ops = cross_device_ops
        self.mesh = mesh
        self.strategy: contracts.Strategy
        follow(self)

    # What a kind of strategy overrides.

    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `fn` once for each replica and merges the results."""
        raise self._make_missing_error("_run_replicas(self, fn, args, kwargs)")

    def _placement(
        self, synchronization: VariableSynchronization, name: str
    ) -> contracts.Placement:
        """Returns where a new variable lives."""
        raise self._make_missing_error("_placement(self, synchronization, name)")

    def _update_copies(
        self, devices: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Runs `fn` once for each of so many copies, each on its device."""
        raise self._make_missing_error("_update_copies(self, devices, fn, args, kwargs)")

    def distribute_values(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Calls `value_fn` once for each replica of this process, and wraps the results.

        Args:
            value_fn: Returns a replica's value, given a `dx.ValueContext` with its index.

        Returns:
            A distributed value; with one replica, the value itself.

        Raises:
            NotImplementedError: The strategy does not define it.
        """
        raise self._make_missing_error("distribute_values(self, value_fn)")

    def _make_missing_error(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} is no complete strategy: it does not define {method}. Override "
            "it, or derive from a strategy that has it."
        )

    # Devices.

    def renew_devices(self, renew: Renew) -> None:
        """Replaces the devices, because JAX has been started again with more of them.

        Args:
            renew: Returns the device that replaces another.
        """
        self._workers = tuple(map(renew, self._workers))
        self._parameters = tuple(map(renew, self._parameters))
        if self.mesh is not None:
            self.mesh = make_replica_mesh([renew(device) for device in self.mesh.devices.flat])

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of this process's devices that run replicas."""
        return tuple(device_name(device) for device in self.local_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of this process's devices that hold variables."""
        return tuple(device_name(device) for device in self._parameters)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose results are combined."""
        return len(self._workers)

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices that run this process's replicas."""
        return self._workers

    @property
    def first_replica(self) -> int:
        """The index of this process's first replica among all replicas."""
        return 0

    def input_target(self) -> InputTarget:
        """Returns whom this process's input pipeline feeds."""
        return InputTarget(self.local_devices, self.mesh, self.num_replicas_in_sync)

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that combines values of different devices."""
        return self._ops

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all replicas must see the same shapes: never, each size is compiled."""
        return False

    def non_slot_devices(self, var_list: Sequence[Variable]) -> object:
        """Returns the devices for variables that belong to no single variable.

        Args:
            var_list: The variables that are being optimized.

        Returns:
            Something that `colocate_vars_with` and `update_non_slot` accept.
        """
        return self.parameter_devices

    # Variables.

    def variable_placement(
        self, synchronization: VariableSynchronization, name: str
    ) -> contracts.Placement:
        """Returns where a variable that is created now lives.

        Args:
            synchronization: When its copies are brought together.
            name: The variable's name, for messages.

        Returns:
            The placement of the new variable.

        Raises:
            ValueError: `synchronization` is NONE, which no strategy supports.
        """
        if synchronization is VariableSynchronization.NONE:
            raise ValueError(
                f"dx.Variable: {name!r} has synchronization=NONE, which no strategy supports. Use "
                "ON_WRITE (the default) or ON_READ."
            )
        beside = get_colocated()
        if beside is not None and synchronization is not VariableSynchronization.ON_READ:
            if isinstance(beside, Variable):
                # Beside a variable of which each replica has its own, a mirrored one is mirrored.
                own = self._placement(synchronization, name)
                return own if beside.per_replica else beside.placement.place_beside()
            devices = resolve_destinations(beside)
            if len(devices) == 1 and devices != self._parameters:
                return Single(devices[0])
        return self._placement(synchronization, name)

    def create_variable(
        self,
        create: Callable[..., Variable],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Variable | ShardedVariable:
        """Creates what `dx.Variable(*args, **kwargs)` becomes under this strategy.

        Args:
            create: Creates an ordinary variable.
            args: The positional arguments of `dx.Variable`.
            kwargs: Its keyword arguments.

        Returns:
            The variable, or one that is made of several.
        """
        return create(*args, **kwargs)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: object) -> Iterator[None]:
        """Creates variables on the devices of a variable, or of `non_slot_devices`.

        Args:
            colocate_with_variable: A variable of this strategy, or what `non_slot_devices`
                returned.

        Yields:
            Nothing; variables that are created inside the `with` block are placed there.

        Raises:
            RuntimeError: Another strategy is current.
            ValueError: The variable was created under another strategy.

        Example:
            >>> import distribax as dx
            >>> strategy = dx.OneDeviceStrategy("CPU:0")
            >>> with strategy.scope():
            ...     v1 = dx.Variable(1.0)
            ...     with strategy.extended.colocate_vars_with(v1):
            ...         v2 = dx.Variable(2.0)
            >>> v1.device == v2.device
            True
        """
        if context.get_strategy() is not self.strategy:
            raise RuntimeError(
                "colocate_vars_with: works inside `with strategy.scope():` of the same strategy "
                f"only; the current strategy is {type(context.get_strategy()).__name__}."
            )
        if isinstance(colocate_with_variable, ShardedVariable):
            colocate_with_variable = colocate_with_variable.variables[0]
        if isinstance(colocate_with_variable, Variable):
            self._check_owned(colocate_with_variable, "colocate_vars_with")
        with colocate(colocate_with_variable):
            yield

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Tells whether `v` was created while this strategy was in scope.

        Args:
            v: A variable.

        Returns:
            Whether this strategy placed it.
        """
        return v.distribute_strategy is self.strategy

    def read_var(self, v: Variable) -> jax.Array:
        """Returns the value of `v`.

        Args:
            v: A variable.

        Returns:
            Its value, as `v.read_value()` gives it.
        """
        return v.read_value()

    def value_container(self, value: object) -> object:
        """Returns the variable that `value` is a copy of, or `value` itself.

        Args:
            value: One of `variable.values`, or anything else.

        Returns:
            The variable of a copy; `value` otherwise.
        """
        return value.variable if isinstance(value, VariableCopy) else value

    def _check_owned(self, v: object, what: str) -> None:
        if not isinstance(v, Variable) or not self.variable_created_in_scope(v):
            named = v.described if isinstance(v, Variable) else repr(v)
            raise ValueError(
                f"{what}: {named} is not a variable that was created inside "
                f"`with strategy.scope():` of this {type(self.strategy).__name__}."
            )

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        """Runs `fn` once for each replica, with each replica's part of the arguments.

        Args:
            fn: The function that each replica runs.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            As `Strategy.run`.
        """
        context.require_cross_replica(self.strategy, "call_for_each_replica")
        return run_replicas(self.strategy, fn, args, kwargs or {}, self._run_replicas)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines a value over replicas, and copies the result to `destinations`.

        Args:
            reduce_op: `dx.ReduceOp.SUM` or `MEAN`, or its name.
            value: A distributed value.
            destinations: Where the result goes: a variable (to its devices), a device, several
                devices, or None for all replicas.
            options: Hints for the collective; the strategy's own by default.

        Returns:
            The combined value, mirrored over the destinations.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values at once, which is faster than one after the other.

        Args:
            reduce_op: `dx.ReduceOp.SUM` or `MEAN`, or its name.
            value_destination_pairs: The values, each with its destinations as in `reduce_to`.
            options: Hints for the collective; the strategy's own by default.

        Returns:
            The combined values, in order.
        """
        context.require_cross_replica(self.strategy, "reduce_to")
        op = ReduceOp.parse(reduce_op, "reduce_op")
        return reduction.batch(self, op, value_destination_pairs, options)

    def reduce_all(
        self, reduce_op: ReduceOp, values: Sequence[object], options: CommunicationOptions | None
    ) -> list[Any]:
        """Combines values over replicas; the results go to all replicas.

        Args:
            reduce_op: How to combine them.
            values: Distributed values.
            options: Hints for the collective; the strategy's own by default.

        Returns:
            The combined values, in order.
        """
        return reduction.batch(self, reduce_op, [(value, None) for value in values], options)

    def gather_to(
        self,
        value: object,
        destinations: object,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenates a value over replicas along `axis`.

        Args:
            value: A distributed value.
            destinations: Where the result goes, as in `reduce_to`.
            axis: The dimension to concatenate along.
            options: Hints for the collective; the strategy's own by default.

        Returns:
            The concatenated value, mirrored over the destinations.
        """
        context.require_cross_replica(self.strategy, "gather")
        return reduction.gather(self, value, destinations, axis, options)

    def broadcast_to(self, tensor: jax.typing.ArrayLike, destinations: object = None) -> Any:
        """Copies a value to all worker devices, or to `destinations`.

        Args:
            tensor: One array.
            destinations: Where it goes, as in `reduce_to`.

        Returns:
            The mirrored value; with one replica, `tensor` itself.

        Raises:
            ValueError: `tensor` is a distributed value already.
        """
        context.require_cross_replica(self.strategy, "broadcast_to")
        if is_wrapped(tensor):
            raise ValueError(
                f"broadcast_to: tensor={tensor!r} is a distributed value already. Pass one array."
            )
        if self.single:
            return tensor
        if frames.current() is not None:
            return reduction.mirror_in_program(self, tensor)
        devices = self._workers if destinations is None else destinations
        return self._ops.broadcast(tensor, devices)

    def first_value(self, value: DistributedValues) -> Any:
        """Returns replica 0's value, copied to all.

        Args:
            value: A distributed value.

        Returns:
            The mirrored value.
        """
        return reduction.broadcast_first(self, value)

    # Updating.

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(var, *args)` once for each copy of `var`, with arguments mirrored like it.

        Inside `fn`, every variable stands for its copy on the same device.

        Args:
            var: A variable of this strategy.
            fn: Updates one copy, which it gets first.
            args: Further positional arguments; mirrored values are replaced by the copy's part.
            kwargs: Keyword arguments, treated in the same way.
            group: Return one merged value instead of a tuple with a value for each copy.

        Returns:
            What `fn` returns, merged over the copies.

        Raises:
            ValueError: An argument differs per replica, or `var` is another strategy's.
        """
        kwargs = dict(kwargs or {})
        replica = context.get_replica_context()
        if replica is not None and replica.strategy is self.strategy:
            return replica.merge_call(
                lambda strategy, *a, **k: strategy.extended.update(var, fn, a, k, group),
                args=args,
                kwargs=kwargs,
            )
        context.require_cross_replica(self.strategy, "update")
        self._check_owned(var, "update")
        if not var.per_replica:
            reduction.check_no_per_replica((args, kwargs))
        results = self._update_copies(len(var.devices), fn, (var, *args), kwargs)
        return reduction.merge_copies(self, results, group=group, mirrored=not var.per_replica)

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(*args)` once for each of the devices that `non_slot_devices` returned.

        Args:
            colocate_with: What `non_slot_devices` returned.
            fn: Updates the variables on one device.
            args: As for `update`.
            kwargs: As for `update`.
            group: As for `update`.

        Returns:
            What `fn` returns, merged over the devices.
        """
        context.require_cross_replica(self.strategy, "update_non_slot")
        reduction.check_no_per_replica((args, kwargs or {}))
        devices = resolve_destinations(colocate_with)
        results = self._update_copies(len(devices), fn, tuple(args), dict(kwargs or {}))
        return reduction.merge_copies(self, results, group=group, mirrored=True)

    def local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the values of this process's replicas.

        Args:
            value: As for `Strategy.experimental_local_results`.

        Returns:
            As there.
        """
        return reduction.local_results(value)

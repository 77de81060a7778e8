"""`DistributionStrategy`: the interface of TensorFlow 1.9 to a strategy."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from typing_extensions import override

from distribax import context
from distribax.contrib.distribute import fetching, variable_store
from distribax.contrib.distribute.input import PerDeviceDataset
from distribax.data.distributed import InputOptions
from distribax.strategies import Strategy, get_strategy
from distribax.topology import resolve_device
from distribax.types import ReduceOp, VariableSynchronization
from distribax.values import PerReplica, is_wrapped
from distribax.variables import Variable
from distribax.variables.creation import Policy, impose

_ATTRIBUTE = "_distribax_tower_view"


class DistributionStrategy:
    """A list of devices with a policy for state and computation, as TensorFlow 1.9 had it.

    It is a view of a `dx.Strategy`, which does the work and can be used as well. Views of one
    strategy are equal. Make `MirroredStrategy` or `OneDeviceStrategy`, or wrap any other one.

    Args:
        strategy: The strategy to view; the default one, of ordinary behaviour, if not given.

    Raises:
        TypeError: `strategy` is not a `dx.Strategy`.

    Example:
        >>> import distribax as dx
        >>> from distribax.contrib import distribute
        >>> distribution = distribute.DistributionStrategy(dx.OneDeviceStrategy("CPU:0"))
        >>> with distribution.scope():
        ...     v = distribute.get_variable("v", initializer=2.0)
        ...     result = distribution.call_for_each_tower(lambda x: v * x, 3.0)
        ...     [float(value) for value in distribution.unwrap(result)]
        [6.0]
    """

    def __init__(self, strategy: Strategy | None = None) -> None:
        if strategy is None:
            strategy = get_default_strategy()
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"{type(self).__name__}: strategy={strategy!r} is not a dx.Strategy. Pass one, for "
                "example dx.CentralStorageStrategy(), or none for the default strategy."
            )
        self._strategy = strategy
        self._input_options = InputOptions()
        # Kept by the strategy, so that both end together and its code finds this very object.
        vars(strategy).setdefault(_ATTRIBUTE, self)

    @property
    def strategy(self) -> Strategy:
        """The strategy that does the work."""
        return self._strategy

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributionStrategy) and other._strategy is self._strategy

    @override
    def __hash__(self) -> int:
        return hash(self._strategy)

    # What it is.

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower, so that `call_for_each_tower(fn)` calls `fn` once."""
        return self.num_towers == 1

    @property
    def num_towers(self) -> int:
        """The number of towers, for averaging over them."""
        return self._strategy.num_replicas_in_sync

    @property
    def worker_devices(self) -> list[str]:
        """The names of the devices that run towers."""
        return list(self._strategy.extended.worker_devices)

    @property
    def parameter_devices(self) -> list[str]:
        """The names of the devices that hold variables, where `update` runs."""
        return list(self._strategy.extended.parameter_devices)

    @property
    def worker_device_index(self) -> PerReplica | int:
        """Each tower's index among the `worker_devices`, or 0 if there is a single tower.

        It is meant as an argument of `call_for_each_tower`: each tower gets its own index.
        """
        if self.is_single_tower:
            return 0
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )

    def non_slot_devices(self, var_list: Sequence[Variable]) -> object:
        """Returns where to put variables that belong to no single one of `var_list`.

        Args:
            var_list: The variables that are being optimized.

        Returns:
            What `colocate_vars_with` and `update_non_slot` accept.
        """
        found = self._strategy.extended.non_slot_devices(var_list)
        return list(found) if isinstance(found, tuple) else found

    def configure(self, session_config: object = None) -> None:
        """Does nothing: there is no session to configure.

        Args:
            session_config: Accepted as in TensorFlow 1.9; it changes nothing.
        """

    # Scopes.

    @contextlib.contextmanager
    def scope(self) -> Iterator[DistributionStrategy]:
        """Makes this strategy current, and enters its cross-tower context."""
        # The scope of the default strategy stays in the context of its only replica.
        with self._strategy.scope(), context.enter(context.Entry(self._strategy)):
            yield self

    def colocate_vars_with(
        self, colocate_with_variable: object
    ) -> contextlib.AbstractContextManager[None]:
        """Creates variables on the devices of a variable, or on `non_slot_devices`.

        Args:
            colocate_with_variable: A variable, or what `non_slot_devices` returned.

        Returns:
            A context manager.
        """
        return self._strategy.extended.colocate_vars_with(colocate_with_variable)

    @contextlib.contextmanager
    def tower_local_var_scope(self, reduce_method: str) -> Iterator[None]:
        """Creates variables of which each tower has its own, without keeping them in sync.

        They are not trainable.

        Args:
            reduce_method: "sum" or "mean": how the towers' values become one outside the towers, as
                for `fetch` and in checkpoints.

        Yields:
            Nothing; variables that are created inside the `with` block are the towers' own.

        Raises:
            RuntimeError: This strategy is not in scope.
            ValueError: `reduce_method` is neither "sum" nor "mean".
        """
        op = _parse_method(reduce_method, "tower_local_var_scope", "reduce_method")
        if context.get_strategy() is not self._strategy:
            raise RuntimeError(
                f"tower_local_var_scope: {self!r} is not the current strategy. Call it inside "
                "`with distribution.scope():`."
            )
        with impose(Policy(VariableSynchronization.ON_READ, op.name, trainable=False)):
            yield

    # Towers.

    def call_for_each_tower(self, fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Runs `fn` once for each tower, and merges what the towers return.

        Args:
            fn: The function that each tower runs.
            *args: Its arguments; wrapped ones are replaced by the tower's own part.
            **kwargs: Its keyword arguments. `run_concurrently` is not passed on and changes
                nothing: the devices work at the same time anyway.

        Returns:
            As `dx.Strategy.run`.

        Raises:
            TypeError: `fn` is not callable.
            RuntimeError: It is called in a tower, or outside the strategy's scope.
        """
        kwargs.pop("run_concurrently", None)
        _check_callable(fn, "call_for_each_tower", "call_for_each_tower(fn, x)")
        self._require_cross_tower("call_for_each_tower")
        with variable_store.mark_pass(fn):
            return self._strategy.run(fn, args, kwargs)

    def distribute_dataset(
        self, dataset_fn: Callable[[], Iterable[object]] | Iterable[object]
    ) -> PerDeviceDataset:
        """Feeds the towers from a data set: each takes the next element.

        Args:
            dataset_fn: A function without arguments that returns the data set, or the data set.

        Returns:
            A data set with an element for each tower.
        """
        self._require_cross_tower("distribute_dataset")
        make: Callable[[], Any] = lambda: dataset_fn  # noqa: E731
        if callable(dataset_fn) and not isinstance(dataset_fn, Iterable):
            make = dataset_fn
        distributed = self._strategy.distribute_datasets_from_function(
            lambda _: make(), self._input_options
        )
        return PerDeviceDataset(distributed)

    # Combining and copying.

    def broadcast(self, tensor: jax.typing.ArrayLike, destinations: object = None) -> Any:
        """Copies a value to all worker devices, or to others.

        Args:
            tensor: One array.
            destinations: A variable, a device or a list of devices; all worker devices by default.

        Returns:
            The mirrored value.

        Raises:
            ValueError: `tensor` has a value for each tower already.
        """
        self._require_cross_tower("broadcast")
        if is_wrapped(tensor):
            raise ValueError(
                f"broadcast: tensor={tensor!r} has a value for each tower already. Pass one "
                "array; combine the towers' values with distribution.reduce('sum', value)."
            )
        return self._strategy.extended.broadcast_to(tensor, destinations)

    def reduce(self, method_string: str, value: object, destinations: object = None) -> Any:
        """Combines a value over towers, and copies the result to `destinations`.

        Args:
            method_string: "sum" or "mean".
            value: What `call_for_each_tower` has returned.
            destinations: A variable, a device or a list of devices; the devices that the value is
                on by default.

        Returns:
            The combined value, mirrored over the destinations.
        """
        self._require_cross_tower("reduce")
        op = _parse_method(method_string, "reduce", "method_string")
        return self._strategy.extended.reduce_to(op, value, destinations)

    def batch_reduce(
        self, method_string: str, value_destination_pairs: Sequence[tuple[object, object]]
    ) -> list[Any]:
        """Combines several values at once, which is faster than `reduce` one after the other.

        Args:
            method_string: "sum" or "mean".
            value_destination_pairs: The values, each with its destinations as for `reduce`.

        Returns:
            The combined values, in order.
        """
        self._require_cross_tower("batch_reduce")
        op = _parse_method(method_string, "batch_reduce", "method_string")
        pairs = [_check_pair(index, pair) for index, pair in enumerate(value_destination_pairs)]
        return self._strategy.extended.batch_reduce_to(op, pairs)

    def fetch(
        self,
        val: object,
        destination: str | jax.Device = "/device:CPU:0",
        fn: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Returns `val`, or `fn(val)` computed where it is, on one device.

        What is on that device already is not copied. A variable that each tower has for itself is
        combined first. While `dx.function` compiles a step, nothing is moved inside of it.

        Args:
            val: A variable, a value of all towers, or an array.
            destination: The device.
            fn: Computes what to fetch from the value.

        Returns:
            An array on that device; of a value that differs by tower, one for each tower.

        Raises:
            TypeError: `destination` is not one device, or `fn` is not callable.
        """
        context.require_cross_replica(self._strategy, "fetch")
        if not isinstance(destination, (str, jax.Device)):
            raise TypeError(
                f"fetch: destination={destination!r} is a {type(destination).__name__}. Expected "
                "one device, for example '/device:CPU:0'."
            )
        if fn is not None:
            _check_callable(fn, "fetch", "fetch(val, fn=lambda x: x + 1)")
        return fetching.fetch(val, resolve_device(destination), fn)

    def unwrap(self, value: object) -> list[Any]:
        """Returns the values of all towers, or `[value]` for one that is not wrapped.

        Args:
            value: What `call_for_each_tower` returned.

        Returns:
            A value for each tower.
        """
        context.require_cross_replica(self._strategy, "unwrap")
        return self._strategy.unwrap(value)

    def group(self, value: object, name: str | None = None) -> None:
        """Waits until `value` has been computed for all towers.

        Args:
            value: What `call_for_each_tower` or `update` returned.
            name: Accepted as in TensorFlow 1.9; it changes nothing.
        """
        context.require_cross_replica(self._strategy, "group")
        self._strategy.group(value, name)

    # Updating.

    def update(self, var: Variable, fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Runs `fn(var, *args)` once for each device that `var` has a copy on.

        Args:
            var: A variable of this strategy.
            fn: Updates one copy, which it gets first.
            *args: Further arguments, the same for all copies: mirrored values, which are replaced
                by the copy's own, or plain ones.
            **kwargs: Keyword arguments, treated in the same way.

        Returns:
            What `fn` returns, merged over the copies.
        """
        self._require_cross_tower("update")
        _check_callable(fn, "update", "update(v, lambda v, x: v.assign(x), x)")
        return self._strategy.extended.update(var, fn, args, kwargs)

    def update_non_slot(
        self, colocate_with: object, fn: Callable[..., Any], *args: object, **kwargs: object
    ) -> Any:
        """Runs `fn(*args)` once for each of the devices that `non_slot_devices` returned.

        Args:
            colocate_with: What `non_slot_devices` returned.
            fn: Updates the variables on one device.
            *args: Its arguments, as for `update`.
            **kwargs: Its keyword arguments.

        Returns:
            What `fn` returns, merged over the devices.
        """
        self._require_cross_tower("update_non_slot")
        _check_callable(fn, "update_non_slot", "update_non_slot(devices, lambda x: ..., x)")
        return self._strategy.extended.update_non_slot(colocate_with, fn, args, kwargs)

    # Small things.

    def _require_cross_tower(self, what: str) -> None:
        here = context.current()
        if here.strategy is self._strategy and here.replica_context is None:
            return
        if not context.has_strategy():
            raise RuntimeError(
                f"{what}: needs the cross-tower context of {self!r}. Call it inside "
                "`with distribution.scope():`."
            )
        if here.strategy is self._strategy:
            raise RuntimeError(
                f"{what}: needs the cross-tower context, but was called in a tower of {self!r}. "
                "Call it outside call_for_each_tower(), or get there by "
                "get_tower_context().merge_call(lambda distribution, x: ..., x)."
            )
        other = view(get_strategy())
        raise RuntimeError(
            f"{what}: called on {self!r} inside the scope of {other!r}. Call it on "
            "get_distribution_strategy(), or outside that scope."
        )

    @override
    def __repr__(self) -> str:
        devices = ", ".join(self.worker_devices)
        return f"<{type(self).__name__} of {self.num_towers} tower(s) on {devices}>"


def view(strategy: Strategy) -> DistributionStrategy:
    """Returns the object through which tower code sees a strategy."""
    found = vars(strategy).get(_ATTRIBUTE)
    return DistributionStrategy(strategy) if found is None else found


def get_default_strategy() -> Strategy:
    """Returns the strategy that is current where no other is."""
    return contextvars.Context().run(get_strategy)


def _parse_method(method: ReduceOp | str, what: str, argument: str) -> ReduceOp:
    if isinstance(method, ReduceOp):
        return method
    if isinstance(method, str) and method.lower() in ("sum", "mean"):
        return ReduceOp.parse(method, argument)
    raise ValueError(
        f"{what}: {argument}={method!r} is not a way to combine values. Expected 'sum' or 'mean'."
    )


def _check_callable(fn: object, what: str, example: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"{what}: fn={fn!r} is not callable. Pass the function itself, and its arguments "
            f"after it: distribution.{example}."
        )


def _check_pair(index: int, pair: object) -> tuple[object, object]:
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    raise ValueError(
        f"batch_reduce: value_destination_pairs[{index}]={pair!r} is not a pair. Expected "
        "(value, destinations), for example [(gradient, variable)]."
    )

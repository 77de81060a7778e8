"""`Strategy`: what user code talks to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from typing_extensions import override

from distribax import context, jax_private
from distribax.execution import adapters, named_objects, reachable_variables
from distribax.strategies import reduction
from distribax.strategies.extended import StrategyExtended
from distribax.types import ReduceOp, RunOptions, ValueContext
from distribax.values import Mirrored, group, is_wrapped_or_slices, nests

if TYPE_CHECKING:
    from typing import Self

    from distribax.cluster import ClusterResolver
    from distribax.data.dataset import Dataset
    from distribax.data.distributed import (
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputReplicationMode,
    )


class Strategy:
    """A policy for placing state and computation on a list of devices.

    Args:
        extended: What the strategy does: an instance of a subclass of `StrategyExtended`. Users
            create one of the ready strategies instead, for example `dx.MirroredStrategy`.

    Raises:
        TypeError: `extended` is not a `StrategyExtended`.

    Example:
        >>> import distribax as dx
        >>> strategy = dx.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     v = dx.Variable(1.0)
        >>> float(strategy.run(lambda x: v * x, args=(2.0,)))
        2.0
    """

    def __init__(self, extended: StrategyExtended) -> None:
        if not isinstance(extended, StrategyExtended):
            raise TypeError(
                f"{type(self).__name__}: extended={extended!r} is not a StrategyExtended. A "
                "strategy of your own passes an instance of its StrategyExtended subclass."
            )
        self._extended = extended
        extended.strategy = self

    @property
    def extended(self) -> StrategyExtended:
        """The interface for algorithms that know about distribution."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""
        return self._extended.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster that the strategy runs on, or None on one machine."""
        return None

    def scope(self) -> contextlib.AbstractContextManager[Self]:
        """Returns a context manager that makes this strategy current.

        Inside it, variables are created by the strategy's policy, and the code is in the
        cross-replica context. Scopes of the same strategy nest; a scope belongs to its thread.

        Returns:
            The context manager; its `as` name is the strategy.

        Raises:
            RuntimeError: On entry, if another strategy is in scope or a replica is running.
        """
        # Objects of other libraries that are made in the scope must know about it.
        adapters.load_adapters()
        return context.Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn` in every replica, and merges what the replicas return.

        Inside `dx.function`, or if `fn` is one, the replicas are one compiled program; otherwise
        each runs eagerly in a thread of its own.

        Args:
            fn: The function that each replica runs.
            args: Its positional arguments. Distributed values among them, also inside tuples,
                lists and dicts, are replaced by the replica's own part.
            kwargs: Its keyword arguments, treated in the same way.
            options: Accepted as in TensorFlow; it changes nothing.

        Returns:
            What `fn` returns, with one value for each replica in its leaves: a `PerReplica`, a
            `Mirrored` for the result of a collective, or the object itself if all replicas return
            the same one. With one replica, what `fn` returns.

        Raises:
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            RuntimeError: It is called inside a replica, or in the scope of another strategy.
        """
        if not callable(fn):
            raise TypeError(
                f"strategy.run: fn={fn!r} is not callable. Pass the function itself and its "
                "arguments apart: strategy.run(step, args=(x,))."
            )
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"strategy.run: args={args!r} is not a tuple. Write args=(x,), with the comma."
            )
        kwargs = dict(kwargs or {})
        context.require_cross_replica(self, "strategy.run")
        return self._extended.call_for_each_replica(fn, args, kwargs)

    @jax_private.leave_mesh()
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        axis: int | Sequence[int] | None = None,
    ) -> Any:
        """Combines the replicas' values, and their elements along `axis` if it is given.

        Args:
            reduce_op: `dx.ReduceOp.SUM` or `MEAN`, or its name.
            value: What `strategy.run` returned: distributed values, also nested in containers. Of
                a `dx.IndexedSlices`, the rows of all replicas are joined.
            axis: The dimension of each replica's value to reduce as well, or several. Pieces of
                different size get the right denominator: a mean divides by the number of elements.
                None reduces over replicas only.

        Returns:
            The combined value, in the same containers.

        Raises:
            ValueError: A value that all replicas share is summed, or `axis` does not fit.
            RuntimeError: It is called inside a replica, or in the scope of another strategy.
        """
        context.require_cross_replica(self, "strategy.reduce")
        op = ReduceOp.parse(reduce_op, "reduce_op")
        return nests.map_leaves(
            lambda leaf: reduction.reduce_leaf(self._extended, op, leaf, axis),
            value,
            is_wrapped_or_slices,
            of_results=True,
        )

    @jax_private.leave_mesh()
    def gather(self, value: object, axis: int) -> Any:
        """Concatenates the replicas' values along `axis`.

        Args:
            value: What `strategy.run` returned: distributed values, also nested in containers.
            axis: The dimension to concatenate along. The other dimensions must agree.

        Returns:
            The concatenated value, in the same containers.

        Raises:
            ValueError: The shapes or `axis` do not fit, or all replicas share the value.
            NotImplementedError: The value is a `dx.IndexedSlices`.
            RuntimeError: It is called inside a replica, or in the scope of another strategy.
        """
        context.require_cross_replica(self, "strategy.gather")

        def gather_leaf(leaf: object) -> Any:
            gathered = self._extended.gather_to(leaf, None, axis)
            return gathered.get() if isinstance(gathered, Mirrored) else gathered

        return nests.map_leaves(gather_leaf, value, is_wrapped_or_slices, of_results=True)

    @jax_private.leave_mesh()
    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the values of this process's replicas, in the order of the replicas.

        Args:
            value: What `strategy.run` returned, a variable, or containers of them.

        Returns:
            One value (or one container of values) for each replica; `(value,)` for a plain value.
        """
        return self._extended.local_results(value)

    @jax_private.leave_mesh()
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a distributed value out of `value_fn(context)`, called once for each replica.

        Args:
            value_fn: Returns a replica's value, given a `dx.ValueContext` with its index.

        Returns:
            A `PerReplica` with the values; with one replica, the value itself.

        Raises:
            TypeError: `value_fn` is not callable.
            RuntimeError: It is called inside a replica, or in the scope of another strategy.
        """
        context.require_cross_replica(self, "experimental_distribute_values_from_function")
        if not callable(value_fn):
            raise TypeError(
                f"experimental_distribute_values_from_function: value_fn={value_fn!r} is not "
                "callable. Expected a function of a dx.ValueContext that returns a replica's value."
            )
        return self._extended.distribute_values(value_fn)

    # Input.

    def experimental_distribute_dataset(
        self, dataset: Iterable[object], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Divides a data set of global batches among the replicas.

        Each batch is split into one piece for each replica, in order; the last pieces of a batch
        that does not divide are smaller or empty. Over several workers the data set is sharded as
        its `AutoShardPolicy` says.

        Args:
            dataset: A batched `dx.data.Dataset`, or anything that can be iterated: arrays are rows
                (batch them first), others give batches.
            options: How to feed the replicas; see `dx.InputOptions`.

        Returns:
            A data set whose elements hold one piece for each replica.

        Raises:
            ValueError: The data set is not batched, or cannot be sharded as its policy says.
            RuntimeError: It is called inside a replica, or in the scope of another strategy.
        """
        context.require_cross_replica(self, "experimental_distribute_dataset")
        return _import_input().distribute_dataset(dataset, self._extended.input_target(), options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[object]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Feeds replicas from data sets that `dataset_fn` makes, one for each worker.

        Nothing is split or sharded: each replica takes the next batch as it is.

        Args:
            dataset_fn: Returns a data set whose batches have one replica's size, given a
                `dx.InputContext` that tells the worker's index and the number of workers.
            options: How to feed the replicas; see `dx.InputOptions`.

        Returns:
            A data set whose elements hold one batch for each replica.

        Raises:
            TypeError: `dataset_fn` is not callable, or does not return a data set.
            RuntimeError: It is called inside a replica, or in the scope of another strategy.
        """
        context.require_cross_replica(self, "distribute_datasets_from_function")
        target = self._extended.input_target()
        return _import_input().distribute_from_function(dataset_fn, target, options)

    def experimental_make_numpy_dataset(
        self, numpy_input: object, session: object = None
    ) -> Dataset:
        """Makes a data set of the rows of arrays; batch and distribute it afterwards.

        Distributed without batches, it gives one replica its rows as they are, and several of them
        a batch of one row each.

        Args:
            numpy_input: Arrays with the same first dimension, also nested in containers.
            session: Accepted as in TensorFlow 1; it changes nothing.

        Returns:
            A data set with an element for each row.
        """
        return _import_input().make_numpy_rows(numpy_input)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[object]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """An older name of `distribute_datasets_from_function`.

        Args:
            dataset_fn: As there.
            options: As there.

        Returns:
            As there.
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    def make_dataset_iterator(self, dataset: Iterable[object]) -> DistributedIterator:
        """An older form of `iter(strategy.experimental_distribute_dataset(dataset))`.

        Args:
            dataset: As for `experimental_distribute_dataset`.

        Returns:
            An iterator over the distributed data set.
        """
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Iterable[object]],
        replication_mode: InputReplicationMode | None = None,
    ) -> DistributedIterator:
        """An older form of `iter(strategy.distribute_datasets_from_function(input_fn))`.

        Args:
            input_fn: As `dataset_fn` of `distribute_datasets_from_function`.
            replication_mode: Whether `input_fn` is called once for each worker or each replica.

        Returns:
            An iterator over the distributed data set.
        """
        options = _import_input().InputOptions()
        if replication_mode is not None:
            options = _import_input().InputOptions(experimental_replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))

    # Older names.

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """An older name of `run`.

        Args:
            fn: As there.
            args: As there.
            kwargs: As there.
            options: As there.

        Returns:
            As there.
        """
        return self.run(fn, args, kwargs, options)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: DistributedIterator | None = None
    ) -> Any:
        """An older form of `run`: `fn` gets the next element of `input_iterator`.

        Args:
            fn: The function that each replica runs.
            input_iterator: Where its argument comes from; None calls it without arguments.

        Returns:
            As `run`.
        """
        args = () if input_iterator is None else (next(input_iterator),)
        return self.run(fn, args)

    def unwrap(self, value: object) -> list[Any]:
        """An older name of `experimental_local_results`.

        Args:
            value: As there.

        Returns:
            The values as a list.
        """
        return list(self.experimental_local_results(value))

    def group(self, value: object, name: str | None = None) -> None:
        """Waits until `value` has been computed, as running a group of TensorFlow ops does.

        Args:
            value: What `strategy.run` or `extended.update` returned.
            name: Accepted as in TensorFlow; it changes nothing.
        """
        group(self.unwrap(value))

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if named_objects.get_destination() is not None:
            raise TypeError(
                f"{type(self).__name__}: a function that refers to it cannot run on a worker of a "
                "parameter server strategy, whose processes have strategies of their own."
            )
        return super().__reduce_ex__(protocol)

    @override
    def __repr__(self) -> str:
        devices = ", ".join(self._extended.worker_devices)
        count = self.num_replicas_in_sync
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return f"<dx.{type(self).__name__} of {replicas} on {devices}>"


# What a strategy holds are no variables of the functions that use it.
reachable_variables.end_at(Strategy)


def experimental_make_numpy_dataset(numpy_input: object, session: object = None) -> Dataset:
    """Makes a data set of the rows of arrays for the current strategy.

    Args:
        numpy_input: Arrays with the same first dimension, also nested in containers.
        session: Accepted as in TensorFlow 1; it changes nothing.

    Returns:
        A data set with an element for each row.
    """
    return get_strategy().experimental_make_numpy_dataset(numpy_input, session)


def _import_input() -> ModuleType:
    """Returns the input side, which is loaded when a data set is first distributed."""
    import distribax.data.distributed as distributed

    return distributed


def get_strategy() -> Strategy:
    """Returns the current strategy; a default one when none is in scope.

    Returns:
        The strategy whose scope, or whose replica, the code runs in.
    """
    # Lower layers know it by what they ask of it, a protocol; every strategy is of this class.
    return cast("Strategy", context.get_strategy())

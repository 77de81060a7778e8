"""`Strategy`: what user code talks to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from distribax import context
from distribax.execution import Function, frames, host_compiled_run, named_objects
from distribax.strategies import reduction
from distribax.strategies.extended import StrategyExtended
from distribax.types import Args, Kwargs, Nest, ReduceOp, RunOptions, StepFn, ValueContext
from distribax.values import Mirrored

if TYPE_CHECKING:
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
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster that the strategy runs on, or None on one machine."""
        return None

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that makes this strategy current.

        Inside it, variables are created by the strategy's policy, and the code is in the
        cross-replica context. Scopes of the same strategy nest; a scope belongs to its thread.
        """
        return context.enter_scope(self)

    def run(
        self,
        fn: StepFn,
        args: Args = (),
        kwargs: Kwargs | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn` in every replica, and merges what the replicas return.

        Distributed values among the arguments are replaced by the replica's own part. Inside
        `dx.function`, or if `fn` is one, the replicas are one compiled program; otherwise each
        runs eagerly in a thread of its own.
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
        if frames.current() is None:
            if isinstance(fn, Function):
                return fn.run_on(self, args, kwargs)
            compiled_run = host_compiled_run()
            if compiled_run is not None:
                return compiled_run(self, fn, args, kwargs)
        if isinstance(fn, Function):
            fn = fn.python_function
        return self._extended.call_for_each_replica(fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: Nest, axis: int | None = None) -> Nest:
        """Combines the replicas' values, and their elements along `axis` if it is given.

        With an axis, pieces of different size are combined with the right denominator: a mean
        divides by the number of elements that there are.
        """
        context.require_cross_replica(self, "strategy.reduce")
        op = ReduceOp.parse(reduce_op, "reduce_op")
        return jax.tree.map(
            lambda leaf: reduction.reduce_leaf(self._extended, op, leaf, axis),
            value,
            is_leaf=reduction.is_wrapped,
        )

    def gather(self, value: Nest, axis: int) -> Nest:
        """Concatenates the replicas' values along `axis`."""
        context.require_cross_replica(self, "strategy.gather")

        def one(leaf: Any) -> Any:
            gathered = self._extended.gather_to(leaf, None, axis)
            return gathered.get() if isinstance(gathered, Mirrored) else gathered

        return jax.tree.map(one, value, is_leaf=reduction.is_wrapped)

    def experimental_local_results(self, value: Nest) -> tuple[Any, ...]:
        """Returns the values of this process's replicas; `(value,)` for a plain value."""
        return self._extended.local_results(value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a distributed value out of `value_fn(context)`, called once for each replica."""
        context.require_cross_replica(self, "experimental_distribute_values_from_function")
        if not callable(value_fn):
            raise TypeError(
                f"experimental_distribute_values_from_function: value_fn={value_fn!r} is not "
                "callable. Expected a function of a dx.ValueContext that returns a replica's value."
            )
        return self._extended.distribute_values(value_fn)

    # Input.

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Divides a data set of global batches among the replicas.

        Each batch is split into one piece for each replica, in order; the last pieces of a batch
        that does not divide are smaller or empty. Over several workers the data set is sharded as
        its `AutoShardPolicy` says. Anything that can be iterated is accepted beside a
        `dx.data.Dataset`: arrays are rows (batch them first), others give batches.
        """
        context.require_cross_replica(self, "experimental_distribute_dataset")
        return _input().distribute_dataset(dataset, self._extended.input_target(), options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Feeds replicas from data sets that `dataset_fn` makes, one for each worker.

        The data set gives batches of one replica's size; each replica takes the next one. Nothing
        is split or sharded.
        """
        context.require_cross_replica(self, "distribute_datasets_from_function")
        target = self._extended.input_target()
        return _input().distribute_from_function(dataset_fn, target, options)

    def experimental_make_numpy_dataset(self, numpy_input: Nest, session: Any = None) -> Dataset:
        """Makes a data set of the rows of arrays; batch and distribute it afterwards."""
        return _input().Dataset.from_tensor_slices(numpy_input)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """An older name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """An older form of `iter(strategy.experimental_distribute_dataset(dataset))`."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode | None = None,
    ) -> DistributedIterator:
        """An older form of `iter(strategy.distribute_datasets_from_function(input_fn))`."""
        options = _input().InputOptions()
        if replication_mode is not None:
            options = _input().InputOptions(experimental_replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))

    # Older names.

    def experimental_run_v2(self, fn: StepFn, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """An older name of `run`."""
        return self.run(fn, args, kwargs)

    def experimental_run(self, fn: StepFn, input_iterator: Any = None) -> Any:
        """An older form of `run`: `fn` gets the next element of `input_iterator`."""
        args = () if input_iterator is None else (next(input_iterator),)
        return self.run(fn, args)

    def unwrap(self, value: Nest) -> list[Any]:
        """An older name of `experimental_local_results`; it returns a list."""
        return list(self.experimental_local_results(value))

    def group(self, value: Nest, name: str | None = None) -> None:
        """Waits until `value` has been computed, as running a group of TensorFlow ops does."""
        leaves = jax.tree.leaves(self.unwrap(value), is_leaf=reduction.is_wrapped)
        jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if named_objects.destination() is not None:
            raise TypeError(
                f"{type(self).__name__}: a function that refers to it cannot run on a worker of a "
                "parameter server strategy, whose processes have strategies of their own."
            )
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        devices = ", ".join(self._extended.worker_devices)
        count = self.num_replicas_in_sync
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return f"<dx.{type(self).__name__} of {replicas} on {devices}>"


def _input() -> Any:
    """Returns the input side, which is loaded when a data set is first distributed."""
    import distribax.data.distributed as distributed

    return distributed

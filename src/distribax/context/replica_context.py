"""What a replica can ask and do: its id, and meeting the other replicas."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import jax

from distribax.context import stack
from distribax.types import Args, Kwargs, Nest, ReduceOp, StepFn


class Runner(Protocol):
    """The way the replicas are run: inline, in threads, or as one SPMD program.

    `compiles` tells whether a `dx.function` called in the replica compiles by itself, `copy_id`
    which of this process's copies of a variable is the replica's.
    """

    compiles: bool

    @property
    def replica_id(self) -> Any: ...

    @property
    def copy_id(self) -> int: ...

    def merge(self, fn: StepFn, args: Args, kwargs: Kwargs) -> Any: ...

    def all_reduce(self, op: ReduceOp, leaves: list[Any], options: Any) -> list[Any]: ...

    def all_gather(self, leaves: list[Any], axis: int, options: Any) -> list[Any]: ...


class ReplicaContext:
    """The `Strategy` interface inside a replica.

    It is not made by hand: `dx.get_replica_context()` returns it inside the function that is given
    to `strategy.run`.
    """

    def __init__(self, strategy: Any, runner: Runner) -> None:
        self._strategy = strategy
        self._runner = runner
        self._entered: contextlib.ExitStack | None = None

    @property
    def strategy(self) -> Any:
        """The current strategy."""
        return self._strategy

    @property
    def compiles(self) -> bool:
        """Whether a `dx.function` that is called in this replica compiles by itself."""
        return self._runner.compiles

    @property
    def runner(self) -> Runner:
        """The way the replicas are run."""
        return self._runner

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose results are combined."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica: an int, or an int32 scalar while `dx.function` compiles."""
        stack.require_replica(self, "replica_id_in_sync_group")
        return self._runner.replica_id

    @property
    def replica_id(self) -> Any:
        """An older name of `replica_id_in_sync_group`."""
        return self.replica_id_in_sync_group

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that this replica runs on."""
        stack.require_replica(self, "devices")
        devices = self._strategy.extended.worker_devices
        if not isinstance(self._runner.replica_id, int):
            return tuple(devices)
        # Over several workers, the names are of this one's devices.
        return (devices[self._runner.copy_id],)

    def merge_call(self, merge_fn: StepFn, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Meets the other replicas and runs `merge_fn(strategy, *args)` once for all of them.

        Each argument reaches `merge_fn` as the values of all replicas (a `PerReplica`), and each
        replica gets its own part of what `merge_fn` returns.
        """
        stack.require_replica(self, "merge_call")
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call: merge_fn={merge_fn!r} is not callable. Expected a function that "
                "takes the strategy first, such as lambda strategy, x: strategy.reduce('SUM', x)."
            )
        return self._runner.merge(merge_fn, tuple(args), dict(kwargs or {}))

    def all_reduce(self, reduce_op: ReduceOp | str, value: Nest, options: Any = None) -> Nest:
        """Combines `value`, leaf by leaf, over all replicas; each replica gets the result.

        Gradients flow through it: the gradient of a sum is the sum of the gradients.
        """
        stack.require_replica(self, "all_reduce")
        op = ReduceOp.parse(reduce_op, "reduce_op")
        leaves, tree = jax.tree.flatten(value)
        return jax.tree.unflatten(tree, self._runner.all_reduce(op, leaves, options))

    def all_gather(self, value: Nest, axis: int, options: Any = None) -> Nest:
        """Concatenates `value`, leaf by leaf, over all replicas along `axis`.

        The other dimensions must agree; the size along `axis` may differ on the eager path.
        """
        stack.require_replica(self, "all_gather")
        leaves, tree = jax.tree.flatten(value)
        for leaf in leaves:
            _check_gather_axis(leaf, axis)
        return jax.tree.unflatten(tree, self._runner.all_gather(leaves, axis, options))

    def __enter__(self) -> ReplicaContext:
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(stack.enter(stack.Entry(self._strategy, self)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._entered is not None
        self._entered.close()
        self._entered = None

    def __repr__(self) -> str:
        return f"<distribax.ReplicaContext of {type(self._strategy).__name__}>"


def _check_gather_axis(value: Any, axis: Any) -> None:
    shape = jax.numpy.shape(value)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"all_gather: axis={axis!r} does not fit a value of shape {tuple(shape)}. Expected an "
            f"int from {-len(shape)} to {len(shape) - 1}; a scalar has no axis to gather along, "
            "give it one with x[None]."
        )

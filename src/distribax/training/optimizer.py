"""`dx.Optimizer`: any optax transformation, applied to distributed variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from distribax import context, jax_private
from distribax.execution import frames, named_objects
from distribax.training import gradient_pairs
from distribax.training.gradients import value_and_grad
from distribax.types import ReduceOp
from distribax.values import PerReplica
from distribax.variables import Variable

if TYPE_CHECKING:
    import optax

    from distribax.contracts import RemoteUpdate


class Optimizer:
    """Applies an optax transformation to variables; its state lives beside them.

    In a replica, `apply_gradients` sums the replicas' gradients and updates every copy: scale the
    loss by the global batch size (`dx.compute_average_loss`), or ask for `reduce_op="MEAN"`.

    Args:
        transformation: Any `optax.GradientTransformation`.
        name: A prefix for the names of the state's variables.
        reduce_op: How the replicas' gradients are combined.
        gradient_accumulation_steps: Apply the mean of so many calls' gradients at once.

    Example:
        >>> import distribax as dx, optax
        >>> w = dx.Variable(1.0)
        >>> optimizer = dx.Optimizer(optax.sgd(0.1))
        >>> loss, grad = dx.value_and_grad(lambda: w * w, w)()
        >>> optimizer.apply_gradients([(grad, w)])
        >>> round(float(w), 3)
        0.8
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        *,
        name: str = "Optimizer",
        reduce_op: ReduceOp | str = ReduceOp.SUM,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        if not hasattr(transformation, "init") or not hasattr(transformation, "update"):
            raise TypeError(
                f"dx.Optimizer: transformation={transformation!r} is not an optax transformation. "
                "Pass one, for example dx.Optimizer(optax.adam(1e-3))."
            )
        if gradient_accumulation_steps < 1:
            raise ValueError(
                f"dx.Optimizer: gradient_accumulation_steps={gradient_accumulation_steps} is less "
                "than 1. Expected how many calls' gradients make one update."
            )
        # Imported on use: it would make `import distribax` a good deal slower.
        import optax

        self._optax = optax
        if gradient_accumulation_steps > 1:
            transformation = optax.MultiSteps(
                transformation, every_k_schedule=gradient_accumulation_steps
            ).gradient_transformation()
        self._transformation = optax.with_extra_args_support(transformation)
        self._reduce_op = ReduceOp.parse(reduce_op, "reduce_op")
        self._name = name
        self._targets: list[Variable] | None = None
        self._slots: list[Variable] = []
        self._tree: Any = None
        self._keys: set[int] = set()
        self._slot_owners: list[int | None] = []
        self._iterations: Variable | None = None
        self._compiled = jax.jit(self._stepped)
        self._served: RemoteUpdate | None = None
        self._needs_whole = False
        # The strategy in whose scope it was made, and its name in other processes.
        self._home = context.get_strategy()
        self._uid: str | None = None

    @property
    def iterations(self) -> Variable:
        """How often gradients have been applied."""
        self._find_targets()
        if self._iterations is None:
            self._iterations = Variable(
                0,
                trainable=False,
                name=f"{self._name}/iterations",
                aggregation="ONLY_FIRST_REPLICA",
            )
        return self._iterations

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's own state, once it is built: the iterations and the slots."""
        # Made here, the iterations could come to lie apart from the variables.
        self._find_targets()
        return [*([] if self._iterations is None else [self._iterations]), *self._slots]

    def build(self, variables: Iterable[Variable]) -> None:
        """Creates the state for `variables`; `apply_gradients` does it on its first call."""
        targets = [target for v in variables for target in gradient_pairs.targets_of(v)]
        if self._targets is not None:
            if [id(v) for v in targets] != [id(v) for v in self._targets]:
                raise ValueError(
                    f"dx.Optimizer: it was built for {_names(self._targets)} but is given "
                    f"{_names(targets)}. Use one optimizer for each list of variables."
                )
            return
        if targets[0].source is not None:
            self._build_served(targets)
            return
        state = jax_private.run_outside_trace(lambda: self._initial_state(targets))
        leaves, self._tree = jax.tree.flatten(state)
        # Variables hold numbers; the random keys of a transformation are made of them on use.
        self._keys = {index for index, leaf in enumerate(leaves) if jax_private.is_key(leaf)}
        leaves = jax_private.run_outside_trace(lambda: [_without_key(leaf) for leaf in leaves])
        beside = self._owners(state, targets)
        self._slot_owners = [None if owner is None else targets.index(owner) for owner in beside]
        strategy = targets[0].distribute_strategy
        here = context.get_strategy() is strategy
        # Called outside the scope, the state still belongs where the variables are.
        slots: list[Variable] = []
        with contextlib.nullcontext() if here else strategy.scope():
            for index, (leaf, owner) in enumerate(zip(leaves, beside, strict=True)):
                with strategy.extended.colocate_vars_with(targets[0] if owner is None else owner):
                    label = f"{owner.name.removesuffix(':0')}/" if owner is not None else ""
                    name = f"{self._name}/{label}slot_{index}"
                    slots.append(Variable(leaf, trainable=False, name=name))
            _ = self.iterations
        self._slots, self._targets = slots, targets

    def _build_served(self, targets: list[Variable]) -> None:
        strategy = targets[0].distribute_strategy
        shapes = [jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets]
        state = jax_private.run_outside_trace(
            lambda: jax.eval_shape(self._transformation.init, shapes)
        )
        leaves = jax.tree.leaves(state)
        # Rows that are not in the gradient which completes an update would never be updated.
        several = self._optax.MultiStepsState
        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, several))
        self._needs_whole = any(isinstance(node, several) for node in nodes)
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
            raise ValueError(
                "dx.Optimizer: the transformation keeps random keys, which parameter servers "
                "cannot hold. Add noise to the gradients in the worker's function instead."
            )
        owners = [
            None if owner is None else targets.index(owner)
            for owner in self._owners(state, targets)
        ]
        self._served = strategy.extended.served_update(
            uid=self._name_elsewhere(),
            transformation=self._transformation,
            targets=targets,
            owners=owners,
            state=leaves,
            name=self._name,
            counter=self._iterations,
        )
        assert self._served is not None
        self._iterations = self._served.counter
        self._slots, self._targets = self._served.slots, targets

    def _name_elsewhere(self) -> str:
        if self._uid is None:
            self._uid = named_objects.make_uid()
            named_objects.register(self._uid, self)
        return self._uid

    def _find_targets(self) -> None:
        """Builds an optimizer that a worker has built, for the same variables."""
        find = getattr(self._home.extended, "targets_of", None)
        targets = find(self._uid) if self._targets is None and self._uid and find else None
        if targets is not None:
            self.build(targets)

    def __reduce_ex__(self, protocol: Any) -> Any:
        strategy = named_objects.get_destination()
        if strategy is None:
            return super().__reduce_ex__(protocol)
        if self._targets is None:
            # Workers will build it; the count of updates is then known here as well.
            self._home = strategy
            with strategy.scope():
                _ = self.iterations
        settings = (self._transformation, self._name, self._reduce_op, self._iterations)
        return _received, (self._name_elsewhere(), self._home, settings, self._targets)

    def _initial_state(self, targets: Sequence[Variable]) -> Any:
        with frames.enter(None):
            # Compiled: one program is made faster than one for each operation and shape.
            init = jax.jit(self._transformation.init)
            return init([variable.host_value() for variable in targets])

    def _owners(self, state: Any, targets: Sequence[Variable]) -> list[Variable | None]:
        """Returns, for each leaf of the state, the variable that it belongs to, or None."""
        marked = self._optax.tree.map_params(
            self._transformation,
            lambda _, index: index,
            state,
            list(range(len(targets))),
            transform_non_params=lambda _: -1,
        )
        return [targets[index] if index >= 0 else None for index in jax.tree.leaves(marked)]

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], **extra_args: Any
    ) -> None:
        """Combines the replicas' gradients, and updates the variables with them.

        Call it in a replica with the replica's own gradients, or outside with combined (or
        per-replica) ones. The first call's variables are those that the optimizer is for. A
        variable without a gradient, None or not mentioned in a later call, stays as it is, and so
        does the state that belongs to it. A sparse gradient (`dx.IndexedSlices`) of a variable on a
        server changes only those rows of it and of the optimizer's state.
        """
        grads, variables = gradient_pairs.of_variables(grads_and_vars)
        if all(grad is None for grad in grads):
            raise ValueError(
                "apply_gradients: no gradients. Pass pairs of gradient and variable: "
                "optimizer.apply_gradients(zip(grads, variables))."
            )
        if self._targets is None:
            self.build(variables)
        assert self._targets is not None
        grads = gradient_pairs.in_order(grads, variables, self._targets)
        replica = context.get_replica_context()
        strategy = variables[0].distribute_strategy
        if replica is None or not (replica.strategy is strategy or context.has_strategy()):
            self._apply_outside(strategy, grads, extra_args)
        else:
            replica.merge_call(self._merge, args=(grads, extra_args))

    def _merge(self, strategy: Any, grads: list[Any], extra_args: dict[str, Any]) -> None:
        if not strategy.extended.single:
            given = [index for index, grad in enumerate(grads) if grad is not None]
            grads = self._reduced(strategy, grads, given)
        self._apply(strategy, grads, extra_args)

    def _apply_outside(self, strategy: Any, grads: list[Any], extra_args: dict[str, Any]) -> None:
        # What is one value for all replicas has been combined already.
        own = [index for index, grad in enumerate(grads) if isinstance(grad, PerReplica)]
        self._apply(strategy, self._reduced(strategy, grads, own), extra_args)

    def _reduced(self, strategy: Any, grads: list[Any], indices: list[int]) -> list[Any]:
        """Returns the gradients with those at `indices` combined over the replicas."""
        assert self._targets is not None
        pairs = [(grads[index], self._targets[index]) for index in indices]
        reduced = strategy.extended.batch_reduce_to(self._reduce_op, pairs) if pairs else []
        combined = dict(zip(indices, reduced, strict=True))
        return [combined.get(index, grad) for index, grad in enumerate(grads)]

    def _apply(self, strategy: Any, grads: list[Any], extra_args: dict[str, Any]) -> None:
        if self._served is not None:
            if self._needs_whole:
                grads = [None if grad is None else jnp.asarray(grad) for grad in grads]
            self._served.apply(grads, extra_args)
            return
        assert self._targets is not None
        targets = self._targets
        # All copies on one device change together, as a transformation may look at all gradients.
        strategy.extended.update(targets[0], self._update, args=(grads, extra_args))

    def _update(self, _: Variable, grads: list[Any], extra_args: dict[str, Any]) -> None:
        assert self._targets is not None
        values = [variable.read_value() for variable in self._targets]
        slots = [slot.read_value() for slot in self._slots]
        # Eager: one program is made, and run, faster than one for each of many operations.
        plain = all(isinstance(leaf, (jax.Array, float)) for leaf in jax.tree.leaves(extra_args))
        compute = self._compiled if plain and not jax_private.is_tracing() else self._stepped
        values, slots = compute(grads, slots, values, extra_args)
        for variable, value in zip(self._targets, values, strict=True):
            variable.assign(value)
        for slot, value in zip(self._slots, slots, strict=True):
            slot.assign(value)
        self.iterations.assign_add(1)

    def _stepped(
        self, grads: list[Any], slots: list[Any], values: list[Any], extra_args: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the new values of the variables and of the slots."""
        leaves = [
            jax.random.wrap_key_data(slot) if index in self._keys else slot
            for index, slot in enumerate(slots)
        ]
        state = jax.tree.unflatten(self._tree, leaves)
        # A variable without a gradient takes part as a zero, and what comes out is not used.
        whole = [
            jnp.zeros_like(value) if grad is None else grad
            for grad, value in zip(grads, values, strict=True)
        ]
        updates, state = self._transformation.update(whole, state, values, **extra_args)
        new_values = self._optax.apply_updates(values, updates)
        new_slots = [_without_key(leaf) for leaf in jax.tree.leaves(state)]
        return (
            [
                value if grad is None else new
                for grad, value, new in zip(grads, values, new_values, strict=True)
            ],
            [
                slot if owner is not None and grads[owner] is None else new
                for owner, slot, new in zip(self._slot_owners, slots, new_slots, strict=True)
            ],
        )

    def minimize(self, loss: Any, var_list: Sequence[Variable]) -> Any:
        """Computes the loss (a function without arguments), applies its gradients, returns it."""
        value, grads = value_and_grad(loss, list(var_list))()
        self.apply_gradients(zip(grads, var_list, strict=True))
        return value


def _received(
    uid: str, home: Any, settings: tuple[Any, ...], targets: list[Variable] | None
) -> Optimizer:
    def make() -> Optimizer:
        transformation, name, reduce_op, iterations = settings
        optimizer = Optimizer(transformation, name=name, reduce_op=reduce_op)
        optimizer._uid, optimizer._home, optimizer._iterations = uid, home, iterations
        return optimizer

    optimizer: Optimizer = named_objects.get_or_create(uid, make)
    if targets is not None:
        optimizer.build(targets)
    return optimizer


def _without_key(value: Any) -> Any:
    return jax.random.key_data(value) if jax_private.is_key(value) else value


def _names(variables: Sequence[Variable]) -> list[str]:
    return [variable.name for variable in variables]

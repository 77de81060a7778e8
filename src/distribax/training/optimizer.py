"""`dx.Optimizer`: any optax transformation, applied to distributed variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.context import reuse
from distribax.errors import VariableInJitError
from distribax.execution import frames, named_objects
from distribax.execution.functions.function import Function
from distribax.training import extra_arguments, gradient_pairs
from distribax.training.extra_arguments import ExtraArg, are_plain
from distribax.training.gradient_pairs import Grad, Target
from distribax.training.gradients import value_and_grad
from distribax.training.hyperparameters import Adjustable, find_places, inject, run_now
from distribax.training.optimizer_host import OptimizerHost, RemoteUpdate, UpdateSettings
from distribax.training.optimizer_state import (
    StateLayout,
    accumulate,
    apply_transformation,
    init_state,
)
from distribax.types import ReduceOp
from distribax.values import PerReplica
from distribax.variables import Variable, registry

if TYPE_CHECKING:
    import optax


class Optimizer(Adjustable, metaclass=reuse.Reusable):
    """Applies an optax transformation to variables; its state lives beside them.

    In a replica, `apply_gradients` sums the replicas' gradients and updates every copy: scale the
    loss by the global batch size (`dx.compute_average_loss`), or ask for `reduce_op="MEAN"`.

    The transformation is given the variables' values as a list, in the order of the first call:
    masks and labels are lists of that order, or functions of such a list.

    Args:
        transformation: Any `optax.GradientTransformation`; or a function that returns one, whose
            numbers can then be read and changed (`learning_rate`, `hyperparameters`).
        name: A prefix for the names of the state's variables.
        reduce_op: How the replicas' gradients are combined.
        gradient_accumulation_steps: Apply the mean of so many calls' gradients at once.
        **hyperparameters: The arguments of that function: numbers, or schedules.

    Raises:
        TypeError: If `transformation` is neither, or does not take the hyperparameters.
        ValueError: If `gradient_accumulation_steps` is less than 1.

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
        transformation: optax.GradientTransformation | Callable[..., optax.GradientTransformation],
        *,
        name: str = "Optimizer",
        reduce_op: ReduceOp | str = ReduceOp.SUM,
        gradient_accumulation_steps: int = 1,
        **hyperparameters: float | jax.Array | Callable[..., object] | None,
    ) -> None:
        self._made_by = getattr(transformation, "__name__", None)
        if not hasattr(transformation, "init") or not hasattr(transformation, "update"):
            transformation = inject(transformation, hyperparameters)
        elif hyperparameters:
            raise TypeError(
                f"dx.Optimizer: {sorted(hyperparameters)} cannot be given to a transformation that "
                "is made already. Pass the function that makes it: "
                "dx.Optimizer(optax.adam, learning_rate=1e-3)."
            )
        transformation = accumulate(transformation, gradient_accumulation_steps)
        # Imported on use: it would make `import distribax` much slower.
        import optax

        self._transformation = optax.with_extra_args_support(transformation)
        self._reduce_op = ReduceOp.parse(reduce_op, "reduce_op")
        self._name = name
        self._targets: list[Target] | None = None
        self._slots = []
        self._layout = None
        self._iterations: Variable | None = None
        self._early = {}
        self._used_args: set[str] = set()
        # Eager: one program for all operations and copies compiles and runs faster than many.
        self._compiled_step: Callable[..., Any] = jax.jit(self._step)
        self._compiled_update = Function(self._update_all)
        self._served: RemoteUpdate | None = None
        self._needs_whole = False
        # The strategy in whose scope it was made, and its name in other processes.
        self._home = context.get_strategy()
        registry.note_owner(self, registry.OPTIMIZER_STATE)
        self._uid: str | None = None

    @property
    def iterations(self) -> Variable:
        """How often gradients have been applied.

        Example:
            >>> import distribax as dx, optax
            >>> w = dx.Variable(1.0)
            >>> optimizer = dx.Optimizer(optax.sgd(0.1))
            >>> optimizer.apply_gradients([(1.0, w)])
            >>> int(optimizer.iterations)
            1
        """
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
    def variables(self) -> list[Target]:
        """The optimizer's own state, once it is built: the iterations and the slots.

        Example:
            >>> import distribax as dx, optax
            >>> w = dx.Variable([1.0, 2.0], name="w")
            >>> optimizer = dx.Optimizer(optax.trace(0.9))
            >>> optimizer.build([w])
            >>> [variable.name for variable in optimizer.variables]
            ['Optimizer/iterations:0', 'Optimizer/w/slot_0:0']
        """
        self._find_targets()
        return self.owned_variables  # Iterations made here could lie apart from the variables.

    @property
    def owned_variables(self) -> list[Target]:
        """The part of `variables` that this process knows of: no server is asked."""
        return [*([] if self._iterations is None else [self._iterations]), *self._slots]

    def build(self, variables: Iterable[Target]) -> None:
        """Creates the state for `variables`; `apply_gradients` does it on its first call.

        Args:
            variables: The variables that the optimizer is for, in the order in which the
                transformation is given their values.

        Raises:
            ValueError: If it was built for other variables, or if the transformation cannot be
                used with them; the message says why.

        Example:
            >>> import distribax as dx, optax
            >>> a, b = dx.Variable(1.0), dx.Variable(1.0)
            >>> optimizer = dx.Optimizer(optax.masked(optax.scale(-1.0), [True, False]))
            >>> optimizer.build([a, b])
            >>> optimizer.apply_gradients([(0.5, b)])
            >>> float(a), float(b)
            (1.0, 1.5)
        """
        targets = [target for v in variables for target in gradient_pairs.list_targets(v)]
        if self._targets is not None:
            if [id(v) for v in targets] != [id(v) for v in self._targets]:
                raise ValueError(
                    f"dx.Optimizer: it was built for {_list_names(self._targets)} but is given "
                    f"{_list_names(targets)}. Use one optimizer for each list of variables."
                )
            return
        if gradient_pairs.are_served(targets):
            self._build_served(targets)
            return
        # Those of this process are not divided: each shard is a target.
        state = jax_private.run_outside_trace(
            lambda: self._init_state(cast("list[Variable]", targets))
        )
        layout = StateLayout.describe(state, len(targets))
        leaves = jax_private.run_outside_trace(lambda: layout.flatten(state))
        strategy = targets[0].distribute_strategy
        here = context.get_strategy() is strategy
        # Called outside the scope, the state still belongs where the variables are.
        slots: list[Target] = []
        names = {place.leaf: name for name, place in find_places(layout.structure).items()}
        # Unlike the user's variables, they are the same whether a trace creates or finds them.
        with frames.enter(None), contextlib.nullcontext() if here else strategy.scope():
            for index, (leaf, owner) in enumerate(zip(leaves, layout.owners, strict=True)):
                with strategy.extended.colocate_vars_with(targets[owner or 0]):
                    label = "" if owner is None else f"{targets[owner].name.removesuffix(':0')}/"
                    name = names.get(index, f"{label}slot_{index}")
                    make = functools.partial(self._create_slot, leaf, name)
                    slots.append(jax_private.run_outside_trace(make))
            _ = self.iterations
        self._slots, self._targets, self._layout = slots, targets, layout

    def _build_served(self, targets: list[Target]) -> None:
        import optax

        strategy = targets[0].distribute_strategy
        gradient_pairs.refuse_constraints(targets)
        shapes = [jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets]
        state = jax_private.run_outside_trace(
            lambda: jax.eval_shape(self._transformation.init, shapes)
        )
        layout = StateLayout.describe(state, len(targets))
        # Rows that are not in the gradient which completes an update would never be updated.
        several = optax.MultiStepsState
        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, several))
        self._needs_whole = any(isinstance(node, several) for node in nodes)
        if layout.keys:
            raise ValueError(
                "dx.Optimizer: the transformation keeps random keys, which parameter servers "
                "cannot hold. Add noise to the gradients in the worker's function instead."
            )
        self._home = strategy
        host = strategy.extended
        assert isinstance(host, OptimizerHost)
        settings = UpdateSettings(
            uid=self._get_or_create_uid(),
            transformation=self._transformation,
            targets=targets,
            layout=layout,
            state=jax.tree.leaves(state),
            name=self._name,
            counter=self._iterations,
        )
        self._served = host.create_update(settings)
        self._iterations = self._served.counter
        self._slots, self._targets, self._layout = self._served.slots, targets, layout
        run_now(self._keep_early)

    def _keep_early(self) -> None:
        for name, early in self._early.items():
            self.hyperparameters[name].assign(early.numpy())

    def _get_or_create_uid(self) -> str:
        """Returns the optimizer's name in other processes."""
        if self._uid is None:
            self._uid = named_objects.make_uid()
            named_objects.register(self._uid, self)
        return self._uid

    @override
    def _find_targets(self) -> None:
        """Builds an optimizer that a worker has built, for the same variables."""
        # Only an optimizer of a strategy with servers has a name in other processes.
        if self._targets is None and self._uid is not None:
            host = self._home.extended
            assert isinstance(host, OptimizerHost)
            targets = host.find_targets(self._uid)
            if targets is not None:
                self.build(targets)

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        strategy = named_objects.get_destination()
        if strategy is None:
            return super().__reduce_ex__(protocol)
        if self._targets is None:
            # Workers will build it; the count of updates is then known here as well.
            self._home = strategy
            with strategy.scope():
                _ = self.iterations
        settings = (self._transformation, self._name, self._reduce_op, self._iterations)
        return _get_or_create, (self._get_or_create_uid(), self._home, settings, self._targets)

    def _init_state(self, targets: Sequence[Variable]) -> optax.OptState:
        with frames.enter(None):
            values = [variable.host_value() for variable in targets]
            try:
                return init_state(self._transformation, values)
            except VariableInJitError:  # A rate that is a variable, for example.
                return self._transformation.init(values)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Grad | None, Target]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        *,
        skip_gradients_aggregation: bool = False,
        **extra_args: ExtraArg,
    ) -> None:
        """Combines the replicas' gradients, and updates the variables with them.

        Call it in a replica with the replica's own gradients, or outside with combined (or
        per-replica) ones. The first call's variables are those that the optimizer is for. A
        variable without a gradient, None or not mentioned in a later call, stays as it is, and so
        does the state that belongs to it. A sparse gradient (`dx.IndexedSlices`) of a variable on a
        server changes only those rows of it and of the optimizer's state.

        Args:
            grads_and_vars: Pairs of a gradient, or None, and its variable.
            name: Accepted as in TensorFlow; it changes nothing.
            experimental_aggregate_gradients: Whether to combine the replicas' gradients. With
                False they have been combined already, by `all_reduce` for example, so that all
                replicas pass the same; the first replica's are applied.
            skip_gradients_aggregation: The opposite, as later versions of TensorFlow name it.
            **extra_args: What the transformation takes beside them, such as `value=loss`. All
                replicas have to pass the same, so combine it first:
                `value=dx.get_replica_context().all_reduce("SUM", loss)`. A function of the
                parameters (`value_fn` of a line search) is called with the list of the
                variables' values, and can be passed outside the replicas only.

        Raises:
            TypeError: If a pair does not have a variable second, or if an argument is unknown: a
                number that the transformation does not use, or `global_step`.
            ValueError: If there are no gradients, if a gradient does not fit its variable, if a
                variable is not among those of the first call or occurs twice, or if the
                transformation cannot be used with the variables.
            RuntimeError: If `jax.jit` or the like is tracing the gradients.

        Example:
            >>> import distribax as dx, optax
            >>> w = dx.Variable(1.0)
            >>> optimizer = dx.Optimizer(optax.polyak_sgd())
            >>> loss, grad = dx.value_and_grad(lambda: w * w, w)()
            >>> optimizer.apply_gradients([(grad, w)], value=loss)
            >>> round(float(w), 3)
            0.5
        """
        extra_arguments.refuse_global_step(extra_args)
        combines = experimental_aggregate_gradients and not skip_gradients_aggregation
        op = self._reduce_op if combines else None
        grads, variables = gradient_pairs.split_pairs(grads_and_vars)
        if all(grad is None for grad in grads):
            raise ValueError(
                "apply_gradients: no gradients. Pass pairs of gradient and variable: "
                "optimizer.apply_gradients(zip(grads, variables))."
            )
        if self._targets is None:
            self.build(variables)
        assert self._targets is not None
        extra_arguments.refuse_unused(
            self._transformation, self._targets, extra_args, self._used_args
        )
        grads = gradient_pairs.order_gradients(grads, variables, self._targets)
        replica = context.get_replica_context()
        strategy = variables[0].distribute_strategy
        if replica is None or not (replica.strategy is strategy or context.has_strategy()):
            own = [index for index, grad in enumerate(grads) if isinstance(grad, PerReplica)]
            united = gradient_pairs.unite(strategy, op, grads, self._targets, own)
            self._apply(united, extra_args)
        else:
            if strategy.num_replicas_in_sync > 1:
                extra_arguments.check_no_functions(
                    extra_args,
                    "each replica would call its own, with its own part of the batch. Call "
                    "apply_gradients outside the replicas, with a function of the whole batch.",
                )
            replica.merge_call(self._merge, args=(grads, extra_args, op))

    def _distributed_apply(
        self,
        distribution: contracts.Strategy,
        grads_and_vars: Iterable[tuple[Grad | None, Target]],
        global_step: Variable | None = None,
    ) -> None:
        """Applies the replicas' gradients in the cross-replica context, as TensorFlow 1 names it.

        Args:
            distribution: The strategy, which a merge function is given.
            grads_and_vars: As for `apply_gradients`; gradients may differ per replica.
            global_step: A variable that counts the updates, if there is one.
        """
        context.require_cross_replica(distribution, "_distributed_apply")
        self.apply_gradients(grads_and_vars)
        if global_step is not None:
            distribution.extended.update(global_step, lambda step: step.assign_add(1))

    def _merge(
        self,
        strategy: contracts.Strategy,
        grads: Sequence[Grad | None],
        extra_args: Mapping[str, ExtraArg],
        op: ReduceOp | None,
    ) -> None:
        if not strategy.extended.single:
            given = [index for index, grad in enumerate(grads) if grad is not None]
            grads = gradient_pairs.unite(strategy, op, grads, self._targets, given)
        self._apply(grads, extra_args)

    def _apply(
        self,
        grads: Sequence[Grad | None],
        extra_args: Mapping[str, ExtraArg],
    ) -> None:
        if self._served is not None:
            if self._needs_whole:
                grads = [None if grad is None else jnp.asarray(grad) for grad in grads]
            extra_arguments.check_no_functions(
                extra_args,
                "a parameter server, where the update runs, cannot call it. Use a transformation "
                "that needs no function.",
            )
            self._served.apply(grads, cast("Any", extra_args))
            return
        assert self._targets is not None
        replicas = self._targets[0].distribute_strategy.extended.local_devices
        near = all(target.devices == replicas for target in self._targets)
        update = self._compiled_update if near and are_plain(extra_args) else self._update_all
        update(grads, extra_args)

    def _update_all(self, grads: Sequence[Grad | None], extra_args: Mapping[str, ExtraArg]) -> None:
        assert self._targets is not None
        # All copies on one device change together, as a transformation may look at all gradients.
        extended = self._targets[0].distribute_strategy.extended
        extended.update(self._targets[0], self._update, args=(grads, extra_args))

    def _update(
        self, _: Variable, grads: list[jax.Array | None], extra_args: Mapping[str, ExtraArg]
    ) -> None:
        assert self._targets is not None
        values = [variable.read_value() for variable in self._targets]
        slots = [slot.read_value() for slot in self._slots]
        is_eager = are_plain(extra_args) and not jax_private.is_tracing()
        try:
            compute = self._compiled_step if is_eager else self._step
            new, new_slots = compute(grads, slots, values, extra_args)
        except VariableInJitError:
            # It reads variables, so that it cannot be compiled once for all steps.
            self._compiled_step = self._step
            new, new_slots = self._step(grads, slots, values, extra_args)
        for variable, value, grad in zip(self._targets, new, grads, strict=True):
            constraint = None if grad is None else variable.constraint
            variable.assign(value if constraint is None else constraint(value))
        for slot, value in zip(self._slots, new_slots, strict=True):
            slot.assign(value)
        self.iterations.assign_add(1)

    def _step(
        self,
        grads: list[jax.Array | None],
        slots: list[jax.Array],
        values: list[jax.Array],
        extra_args: Mapping[str, ExtraArg],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the new values of the variables and of the slots."""
        assert self._layout is not None
        return apply_transformation(
            self._transformation, self._layout, grads, slots, values, extra_args
        )

    def minimize(self, loss: Callable[[], jax.Array], var_list: Sequence[Target]) -> jax.Array:
        """Computes a loss, applies its gradients, and returns it.

        Args:
            loss: A function without arguments that computes the loss from the variables.
            var_list: The variables to update.

        Returns:
            The loss before the update.

        Raises:
            ValueError: As `apply_gradients` does.

        Example:
            >>> import distribax as dx, optax
            >>> w = dx.Variable(2.0)
            >>> optimizer = dx.Optimizer(optax.sgd(0.1))
            >>> float(optimizer.minimize(lambda: w * w, [w])), round(float(w), 3)
            (4.0, 1.6)
        """
        value, grads = value_and_grad(loss, list(var_list))()
        self.apply_gradients(zip(grads, var_list, strict=True))
        return value


def _get_or_create(
    uid: str,
    home: contracts.Strategy,
    settings: tuple[optax.GradientTransformation, str, ReduceOp, Variable | None],
    targets: list[Target] | None,
) -> Optimizer:
    """Returns the optimizer that another process knows by this name."""

    def make() -> Optimizer:
        transformation, name, reduce_op, iterations = settings
        optimizer = Optimizer(transformation, name=name, reduce_op=reduce_op)
        optimizer._uid, optimizer._home, optimizer._iterations = uid, home, iterations
        return optimizer

    optimizer: Optimizer = named_objects.get_or_create(uid, make)
    if targets is not None:
        optimizer.build(targets)
    return optimizer


def _list_names(variables: Sequence[Target]) -> list[str]:
    return [variable.name for variable in variables]

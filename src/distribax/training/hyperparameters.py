"""Hyperparameters: the numbers of an optimizer that can be read and changed while it is used.

They are part of the transformation's state (`optax.inject_hyperparams`), so that each is a variable
like the other slots: a compiled step reads it as an input, and a change needs no new trace.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from distribax import context, contracts, jax_private
from distribax.execution import frames
from distribax.training.gradient_pairs import Target
from distribax.training.optimizer_state import StateLayout
from distribax.types import ReduceOp
from distribax.variables import Variable

if TYPE_CHECKING:
    import optax

_T = TypeVar("_T")


def inject(factory: object, arguments: dict[str, Any]) -> optax.GradientTransformation:
    """Returns a transformation whose numbers are part of its state.

    Args:
        factory: A function that returns an optax transformation, such as `optax.adam`.
        arguments: Its arguments: numbers, schedules, and anything else.

    Raises:
        TypeError: `factory` is no such function, or does not take the arguments.
    """
    import optax  # Imported on use, as it makes `import distribax` slower.

    if not callable(factory):
        raise TypeError(
            f"dx.Optimizer: transformation={factory!r} is not an optax transformation. Pass one, "
            "for example dx.Optimizer(optax.adam(1e-3)), or a function that returns one with its "
            "arguments: dx.Optimizer(optax.adam, learning_rate=1e-3)."
        )
    made: Any = optax.inject_hyperparams(factory)(**arguments)
    return made


def run_now(fn: Callable[[], _T]) -> _T:
    """Runs `fn`, which reads or writes variables, at once although a step may be traced."""

    def call() -> _T:
        with frames.enter(None):
            return fn()

    return jax_private.run_outside_trace(call)


class HyperparameterPlace(NamedTuple):
    """Where a hyperparameter is among the leaves of a state, and whether a schedule computes it."""

    leaf: int
    is_scheduled: bool


def find_places(structure: jax.tree_util.PyTreeDef) -> dict[str, HyperparameterPlace]:
    """Returns where the hyperparameters are among the leaves of a state.

    Args:
        structure: The structure of the transformation's state.

    Returns:
        The places by name.

    Example:
        >>> import jax, optax
        >>> adam = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
        >>> find_places(jax.tree.structure(adam.init([1.0])))["momentum"]
        HyperparameterPlace(leaf=2, is_scheduled=False)
    """
    places: dict[str, HyperparameterPlace] = {}
    state = jax.tree.unflatten(structure, range(structure.num_leaves))
    for node in _list_injected(state):
        scheduled = getattr(node, "hyperparams_states", {})
        for name, index in node.hyperparams.items():
            # Of two with the same name, the outer one, or the first, keeps it unchanged.
            number = sum(known.split("_#")[0] == name for known in places)
            key = f"{name}_#{number + 1}" if number else name
            places[key] = HyperparameterPlace(index, name in scheduled)
    return places


def _list_injected(state: object) -> Iterator[Any]:
    import optax

    kinds = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(node, kinds):
            yield node
            yield from _list_injected(node.inner_state)


class Adjustable(abc.ABC):
    """The hyperparameters of an optimizer."""

    _transformation: optax.GradientTransformationExtraArgs
    _name: str
    _reduce_op: ReduceOp
    _home: contracts.Strategy
    _layout: StateLayout | None
    _slots: list[Target]
    # The name of the function that made the transformation, if it is known.
    _made_by: str | None
    # By name, the hyperparameters that were asked for before there was a state.
    _early: dict[str, Variable]

    @abc.abstractmethod
    def _find_targets(self) -> None:
        """Builds the optimizer if another process has built it."""

    @property
    def hyperparameters(self) -> dict[str, Variable]:
        """The numbers of the transformation that can be read and assigned, by name.

        They exist if the optimizer was made from a function and its arguments, or from what
        `optax.inject_hyperparams` returns. One that a schedule computes has its latest value.

        Example:
            >>> import distribax as dx, optax
            >>> optimizer = dx.Optimizer(optax.sgd, learning_rate=0.1, momentum=0.5)
            >>> _ = optimizer.hyperparameters["momentum"].assign(0.9)
            >>> {name: round(float(v), 3) for name, v in optimizer.hyperparameters.items()}
            {'learning_rate': 0.1, 'momentum': 0.9}
        """
        self._find_targets()
        if self._layout is not None:
            # Numbers are not divided.
            slots = cast("list[Variable]", self._slots)
            return {name: slots[place.leaf] for name, place in self._find_places().items()}
        if not self._early:
            leaves = jax.tree.leaves(self._init_empty())
            here = context.get_strategy() is self._home
            with contextlib.nullcontext() if here else self._home.scope():
                for name, place in self._find_places().items():
                    self._early[name] = self._create_slot(leaves[place.leaf], name)
        return dict(self._early)

    @property
    def learning_rate(self) -> Variable:
        """The hyperparameter of that name; assign to it, or to the attribute, to change it.

        Raises:
            AttributeError: The transformation's numbers are fixed.
            ValueError: When it is set although a schedule computes it.

        Example:
            >>> import distribax as dx, optax
            >>> optimizer = dx.Optimizer(optax.adam, learning_rate=0.1)
            >>> optimizer.learning_rate = 0.5
            >>> float(optimizer.learning_rate)
            0.5
        """
        known = self.hyperparameters
        if "learning_rate" not in known:
            raise AttributeError(
                "dx.Optimizer: the transformation has no learning_rate that could be read or "
                f"changed, only {sorted(known)}. Pass the function that makes it and its "
                "arguments: dx.Optimizer(optax.adam, learning_rate=1e-3)."
            )
        return known["learning_rate"]

    @learning_rate.setter
    def learning_rate(self, value: float | jax.Array) -> None:
        variable = self.learning_rate
        if self._find_places()["learning_rate"].is_scheduled:
            raise ValueError(
                f"dx.Optimizer: learning_rate={value!r} cannot be set, as a schedule computes it "
                "before each update. Make the optimizer with a number: "
                "dx.Optimizer(optax.adam, learning_rate=1e-3)."
            )
        variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """Returns what the optimizer is made of, for logs.

        Returns:
            Its name, the name of the function that made the transformation (None if it was made
            before), how gradients are combined, and the hyperparameters of now as numbers.

        Example:
            >>> import distribax as dx, optax
            >>> dx.Optimizer(optax.sgd, learning_rate=0.5).get_config()["hyperparameters"]
            {'learning_rate': 0.5}
        """
        values = {name: v.numpy().item() for name, v in self.hyperparameters.items()}
        combined = {"name": self._name, "reduce_op": self._reduce_op.name}
        return {"transformation": self._made_by, **combined, "hyperparameters": values}

    def _create_slot(self, value: jax.Array | np.ndarray, name: str) -> Variable:
        early = self._early.get(name)
        if early is not None:
            if early.distribute_strategy is context.get_strategy() and early.dtype == value.dtype:
                return early
            value = jnp.asarray(run_now(early.numpy), value.dtype)
        aggregation = "ONLY_FIRST_REPLICA" if not value.ndim else "NONE"
        full = f"{self._name}/{name}"
        return Variable(value, trainable=False, name=full, aggregation=aggregation)

    def _find_places(self) -> dict[str, HyperparameterPlace]:
        if self._layout is not None:
            return find_places(self._layout.structure)
        return find_places(jax.tree.structure(self._init_empty()))

    def _init_empty(self) -> optax.OptState:
        return jax_private.run_outside_trace(lambda: self._transformation.init([]))

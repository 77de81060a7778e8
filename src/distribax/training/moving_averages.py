"""`ExponentialMovingAverage`: averages of variables over a training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from distribax import context, jax_private
from distribax.execution import frames
from distribax.types import VariableAggregation
from distribax.variables import ShardedVariable, Variable
from distribax.variables.reference import Reference

Averaged: TypeAlias = Variable | ShardedVariable
"""What an average can be kept of."""


class ExponentialMovingAverage:
    """Keeps an average of each of some variables, in which later values count more.

    Each call of `apply` makes it `decay * average + (1 - decay) * variable`. Evaluation with the
    averages often does better than with the last values of a training. The averages are variables
    beside their own, which `dx.Checkpoint(averages=ema)` saves.

    Args:
        decay: How much of the average is kept, such as 0.999.
        num_updates: How many updates there have been: a number, an array or a variable. With it
            the decay is at most `(1 + num_updates) / (10 + num_updates)`, so that an average
            follows faster at first.
        zero_debias: Accepted as in TensorFlow; it changes nothing, as the average of a variable
            starts with the value that the variable has.
        name: What the averages' names end with.

    Example:
        >>> import distribax as dx
        >>> v = dx.Variable(1.0, name="v")
        >>> ema = dx.train.ExponentialMovingAverage(0.9)
        >>> ema.apply([v])
        >>> _ = v.assign(3.0)
        >>> ema.apply([v])
        >>> round(float(ema.average(v)), 4), ema.average_name(v)
        (1.2, 'v/ExponentialMovingAverage')
    """

    def __init__(
        self,
        decay: jax.typing.ArrayLike,
        num_updates: jax.typing.ArrayLike | Variable | None = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        self._decay = decay
        self._num_updates = num_updates
        self._name = name
        self._averages: dict[Reference[Averaged], Averaged] = {}

    @property
    def name(self) -> str:
        """What the averages' names end with."""
        return self._name

    @property
    def variables(self) -> list[Averaged]:
        """The averages, in the order in which they were first asked for."""
        return list(self._averages.values())

    def apply(self, var_list: Iterable[Averaged]) -> None:
        """Updates the averages, and creates those that there are not yet.

        All replicas may call it, or the code outside them. An ON_READ variable counts with the
        value that it has outside. On parameter servers, call it once in the coordinator first: only
        that creates variables.

        Args:
            var_list: The variables.

        Raises:
            TypeError: Something in `var_list` is not a variable of floating-point numbers.
        """
        variables = list(var_list)
        for variable in variables:
            if not isinstance(variable, (Variable, ShardedVariable)):
                raise TypeError(
                    f"ExponentialMovingAverage: var_list has {variable!r}, which is not a variable."
                    " Averages of other values are those of a variable that you assign them to."
                )
            if not jnp.issubdtype(variable.dtype, jnp.floating):
                raise TypeError(
                    f"ExponentialMovingAverage: {variable.described} has the data type "
                    f"{variable.dtype.name}. Expected floating-point numbers."
                )
        replica = context.get_replica_context()
        if replica is None or context.get_strategy().extended.single:
            self._update(variables)
        else:
            # Once for all replicas, whose copies are the same.
            replica.merge_call(lambda _: self._update(variables))

    def average(self, var: Averaged) -> Averaged | None:
        """Returns the average of a variable.

        Args:
            var: The variable.

        Returns:
            A variable; None if `apply` was never called with `var`.
        """
        return self._averages.get(Reference(var))

    def average_name(self, var: Averaged) -> str:
        """Returns the name that the average of a variable has, or will have.

        Args:
            var: The variable.

        Returns:
            The name, without TensorFlow's suffix.
        """
        return f"{var.name.removesuffix(':0')}/{self._name}"

    def _update(self, variables: list[Averaged]) -> None:
        averages = [self._get_or_create(variable) for variable in variables]
        decay = jnp.asarray(self._decay)
        if self._num_updates is not None:
            count = jnp.asarray(self._num_updates)
            decay = jnp.minimum(decay, (1 + count) / (10 + count))
        for variable, average in zip(variables, averages, strict=True):
            for part, mean in zip(variable.states, average.states, strict=True):
                difference = mean.read_value() - part.read_value()
                mean.assign_sub(((1 - decay) * difference).astype(mean.dtype))

    def _get_or_create(self, variable: Averaged) -> Averaged:
        known = self.average(variable)
        if known is not None:
            return known
        name = self.average_name(variable)
        shards = [self._create(shard) for shard in variable.states]
        average: Averaged = shards[0]
        if isinstance(variable, ShardedVariable):
            average = variable.like(shards, name)
        self._averages[Reference(variable)] = average
        return average

    def _create(self, variable: Variable) -> Variable:
        strategy = variable.distribute_strategy
        here = context.get_strategy() is strategy
        # It exists from now on, whatever function is being traced.
        with frames.enter(None), contextlib.nullcontext() if here else strategy.scope():
            value = jax_private.run_outside_trace(variable.read_value)
            with strategy.extended.colocate_vars_with(variable):
                return Variable(
                    value,
                    trainable=False,
                    name=self.average_name(variable),
                    aggregation=VariableAggregation.MEAN,
                )

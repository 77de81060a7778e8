"""Metrics that each replica updates for itself and that are combined when they are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax import context
from distribax.context import reuse
from distribax.types import VariableAggregation, VariableSynchronization
from distribax.variables import Variable, registry


class Metric(metaclass=reuse.Reusable):
    """Base of metrics: a few sums, kept by each replica and added up on reading.

    A metric belongs to the strategy in whose scope it is created. `update_state` is called in
    replicas; `result` anywhere. Subclasses override `update_state` and `result`. What a replica
    whose piece of the batch is empty adds counts for nothing.

    Args:
        name: The name of the metric, with which the names of its variables begin; None for the
            default of its class.
    """

    _default_name: ClassVar[str] = "metric"

    def __init__(self, name: str | None = None) -> None:
        self.name = self._default_name if name is None else name
        self._variables: list[Variable] = []
        registry.note_owner(self, registry.METRIC)

    def add_variable(
        self, name: str, dtype: jax.typing.DTypeLike = jnp.float32, shape: tuple[int, ...] = ()
    ) -> Variable:
        """Creates a sum that each replica keeps for itself.

        Args:
            name: Its name within the metric.
            dtype: Its data type.
            shape: Its shape.

        Returns:
            The variable, which starts at zero.
        """
        variable = Variable(
            lambda: jnp.zeros(shape, dtype),
            name=f"{self.name}/{name}",
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        # A loss that a replica without examples has computed is no loss.
        variable.counts_idle = False
        self._variables.append(variable)
        return variable

    @property
    def variables(self) -> list[Variable]:
        """The sums that the metric keeps."""
        return list(self._variables)

    @property
    def owned_variables(self) -> list[Variable]:
        """The same as `variables`; see `dx.Optimizer.owned_variables`."""
        return self.variables

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Adds this replica's values.

        Args:
            *args: What the subclass measures.
            **kwargs: The same, by name.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how to count. Override update_state(self, "
            "...) and add to the variables that self.add_variable(name) has made."
        )

    def result(self) -> jax.Array:
        """Returns the metric over all replicas.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what it comes to. Override result(self) and "
            "compute it from the variables of the metric."
        )

    def reset_state(self) -> None:
        """Starts again from nothing; call it outside the replicas."""
        for variable in self._variables:
            variable.assign(jnp.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """An older name of `reset_state`."""
        self.reset_state()

    def merge_state(self, metrics: Iterable[Metric]) -> None:
        """Adds what other metrics have counted; call it outside the replicas.

        Args:
            metrics: Metrics of the same kind, with variables of the same shapes.

        Raises:
            ValueError: A metric has other variables.
        """
        others = list(metrics)
        shapes = [variable.shape for variable in self._variables]
        for other in others:
            if [variable.shape for variable in other.variables] != shapes:
                raise ValueError(
                    f"merge_state: metric {other.name!r} does not have the variables of "
                    f"{self.name!r}. Expected metrics made with the same class and arguments."
                )
        for other in others:
            for variable, more in zip(self._variables, other.variables, strict=True):
                variable.assign(variable.read_value() + more.read_value())

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Adds values and returns the metric.

        Args:
            *args: As for `update_state`.
            **kwargs: As for `update_state`.

        Returns:
            As `result`.
        """
        self.update_state(*args, **kwargs)
        return self.result()

    def _read_totals(self) -> list[jax.Array]:
        """Returns the sums over all replicas, in a replica too."""
        replica = context.get_replica_context()
        if replica is None:
            return [variable.read_value() for variable in self._variables]
        return replica.merge_call(
            lambda strategy: [variable.read_value() for variable in self._variables]
        )


class Sum(Metric):
    """The weighted sum of values.

    Args:
        name: The name of the metric; None for "sum".
        dtype: The data type of the sum.

    Example:
        >>> import distribax as dx
        >>> total = dx.metrics.Sum()
        >>> float(total([1.0, 2.0]))
        3.0
    """

    _default_name = "sum"

    def __init__(self, name: str | None = None, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        super().__init__(name)
        self._total = self.add_variable("total", dtype)

    @override
    def update_state(
        self, values: jax.typing.ArrayLike, sample_weight: jax.typing.ArrayLike | None = None
    ) -> None:
        """Adds values, each times its weight.

        Args:
            values: The values, of any shape.
            sample_weight: A weight for each value, for each example, or for all.

        Raises:
            ValueError: The weights do not fit the values.
        """
        self._total.assign_add(jnp.sum(apply_weights(values, sample_weight, "Sum")[0]))

    @override
    def result(self) -> jax.Array:
        """Returns the sum over all replicas."""
        return self._read_totals()[0]


class Mean(Metric):
    """The weighted mean of values.

    Args:
        name: The name of the metric; None for "mean".
        dtype: The data type of the sums.

    Example:
        >>> import distribax as dx
        >>> mean = dx.metrics.Mean()
        >>> float(mean([1.0, 3.0]))
        2.0
    """

    _default_name = "mean"

    def __init__(self, name: str | None = None, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        super().__init__(name)
        self._total = self.add_variable("total", dtype)
        self._count = self.add_variable("count", dtype)

    @override
    def update_state(
        self, values: jax.typing.ArrayLike, sample_weight: jax.typing.ArrayLike | None = None
    ) -> None:
        """Adds values with their weights.

        Args:
            values: The values, of any shape.
            sample_weight: A weight for each value, for each example, or for all.

        Raises:
            ValueError: The weights do not fit the values.
        """
        weighted, weights = apply_weights(values, sample_weight, "Mean")
        self._total.assign_add(jnp.sum(weighted))
        self._count.assign_add(jnp.sum(weights))

    @override
    def result(self) -> jax.Array:
        """Returns the mean over all replicas; 0 before the first value."""
        total, count = self._read_totals()
        return divide(total, count)


def divide(above: jax.Array, below: jax.Array) -> jax.Array:
    """Returns quotients; 0 where something is divided by 0."""
    return jnp.where(below == 0, 0.0, above / jnp.where(below == 0, 1.0, below))


def apply_weights(
    values: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None, what: str
) -> tuple[jax.Array, jax.Array]:
    """Returns the values times their weights, and the weights in the shape of the values.

    Weights may have a last dimension of size 1 that the values do not have.

    Raises:
        ValueError: The weights do not fit.
    """
    values = jnp.asarray(values, dtype=jnp.float32)
    if weights is None:
        return values, jnp.ones_like(values)
    weights = jnp.asarray(weights, dtype=jnp.float32)
    given = weights.shape
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    if weights.ndim != values.ndim or any(
        size not in (1, rows) for size, rows in zip(weights.shape, values.shape, strict=True)
    ):
        raise ValueError(
            f"{what}: sample_weight of shape {tuple(given)} does not fit values of shape "
            f"{tuple(values.shape)}. Expected a scalar, or the first dimensions of the values, "
            "each of the same size or of size 1."
        )
    weights = jnp.broadcast_to(weights, values.shape)
    return values * weights, weights

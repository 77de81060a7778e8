"""A Keras optimizer as an optax transformation, which parameter servers can run.

Each parameter has a Keras optimizer of its own, built for it alone, so that its slots are known to
be its own, whatever they are: a server updates the parameters that it has. Clipping, which may look
at all gradients at once, is done by the worker before it sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from distribax.coordinator.pickling import pickle_by_value
from distribax.integrations.keras.served.model_pickle import list_code_of_optimizer

if TYPE_CHECKING:
    import optax

_DONE_BY_WORKERS = ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
_NAME = "parameter"


class KerasState(NamedTuple):
    """The state of a Keras optimizer: the number of updates, and the slots of each parameter."""

    iterations: jax.Array
    slots: list[list[jax.Array]]


@dataclass
class KerasUpdate:
    """Makes the transformation for a learning rate; it is sent to the servers.

    Args:
        config: The optimizer, as `keras.saving.serialize_keras_object` writes it.
        custom_objects: The classes and functions that Keras cannot find by itself, by name.
    """

    config: dict[str, Any]
    custom_objects: dict[str, Any]
    # One optimizer for each form of a parameter: it is only used as a function.
    _built: dict[Any, keras.Optimizer] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, optimizer: keras.Optimizer) -> KerasUpdate:
        """Returns the update of a Keras optimizer."""
        code = list(list_code_of_optimizer(optimizer))
        for each in code:
            pickle_by_value(each)
        own = {each.__name__: each for each in code if not each.__module__.startswith("keras.")}
        return cls(keras.saving.serialize_keras_object(optimizer), own)

    def __call__(self, learning_rate: float | jax.Array) -> optax.GradientTransformation:
        """Returns the transformation.

        Args:
            learning_rate: The rate; ignored if the optimizer has a schedule.
        """
        import optax

        def update(
            grads: Sequence[jax.Array], state: KerasState, params: Sequence[jax.Array] | None = None
        ) -> tuple[list[jax.Array], KerasState]:
            assert params is not None
            updates, slots = [], []
            for grad, param, own in zip(grads, params, state.slots, strict=True):
                optimizer = self._get(param)
                variables = self._join(optimizer, state.iterations, learning_rate, own)
                [new], changed = optimizer.stateless_apply(variables, [grad], [param])
                updates.append(new - param)
                slots.append(self._list_slots(optimizer, changed))
            return updates, KerasState(state.iterations + 1, slots)

        return optax.GradientTransformation(self._init, update)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": {}}

    def name_slots(self, variables: Sequence[keras.Variable]) -> list[str]:
        """Returns the names that a Keras optimizer gives the slots of these parameters."""
        names = []
        for variable in variables:
            path = variable.path.replace("/", "_")
            optimizer = self._get(variable)
            for slot in self._list_slots(optimizer, optimizer.variables):
                names.append(path + slot.name.removeprefix(_NAME))
        return names

    def _init(self, params: Sequence[jax.Array]) -> KerasState:
        slots = [
            [param if starts_as_param else jnp.asarray(value) for value, starts_as_param in own]
            for param, own in ((param, self._get_initial_slots(param)) for param in params)
        ]
        return KerasState(jnp.zeros((), jnp.int32), slots)

    def _get_initial_slots(self, param: jax.Array) -> list[tuple[Any, bool]]:
        """Returns the values that slots begin with, and whether that is the parameter's own."""
        zeros, ones = (
            self._list_slots(each, [variable.value for variable in each.variables])
            for each in (self._get(param), self._build(param, 1.0))
        )
        return [
            (zero, not np.array_equal(zero, one)) for zero, one in zip(zeros, ones, strict=True)
        ]

    def _get(self, param: jax.Array | keras.Variable) -> keras.Optimizer:
        """Returns an optimizer that is built for a parameter of this form."""
        form = tuple(param.shape), jnp.dtype(param.dtype).name
        if form not in self._built:
            self._built[form] = self._build(param, 0.0)
        return self._built[form]

    def _build(self, param: jax.Array | keras.Variable, value: float) -> keras.Optimizer:
        # The transformation is traced, and its variables must not be part of the trace.
        with jax.ensure_compile_time_eval():
            optimizer = self.make()
            filled = jnp.full(param.shape, value, param.dtype)
            optimizer.build([keras.Variable(filled, name=_NAME)])
        return optimizer

    def make(self) -> keras.Optimizer:
        """Returns a new optimizer, without the clipping."""
        settings = {**self.config["config"], **dict.fromkeys(_DONE_BY_WORKERS)}
        return keras.saving.deserialize_keras_object(
            {**self.config, "config": settings}, custom_objects=self.custom_objects, safe_mode=False
        )

    def _join(
        self,
        optimizer: keras.Optimizer,
        iterations: jax.Array,
        learning_rate: float | jax.Array,
        slots: Sequence[jax.Array],
    ) -> list[Any]:
        """Returns the values of the optimizer's variables, in their order."""
        rest = iter(slots)
        values: list[Any] = []
        for variable in optimizer.variables:
            if variable is optimizer._iterations:
                values.append(iterations)
            elif variable is optimizer._learning_rate:
                values.append(jnp.asarray(learning_rate, variable.dtype))
            else:
                values.append(next(rest))
        return values

    def _list_slots(self, optimizer: keras.Optimizer, values: Sequence[Any]) -> list[Any]:
        """Returns the values that belong to the parameter alone."""
        shared = (optimizer._iterations, optimizer._learning_rate)
        return [
            value
            for variable, value in zip(optimizer.variables, values, strict=True)
            if not any(variable is each for each in shared)
        ]

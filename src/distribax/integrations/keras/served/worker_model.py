"""A model in a worker's process: it computes with values from the servers, and sends changes back.

The model travels without the values of its variables, which are never used: each step is given
those of the variables on the servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import keras
from typing_extensions import override

from distribax import contracts
from distribax.execution import named_objects
from distribax.integrations.keras.served.model_pickle import load_model
from distribax.training.gradient_pairs import Target
from distribax.training.gradients import value_and_grad
from distribax.training.optimizer import Optimizer
from distribax.variables.sharded.embedding import embedding_lookup

Batch: TypeAlias = Any
Values: TypeAlias = list[Any]
Seeds: TypeAlias = Sequence[Any]


@dataclass(frozen=True)
class Recipe:
    """What a process needs to have a model, and to find its variables.

    Attributes:
        model: The model, as `model_pickle` writes it.
        trainable: The trainable variables, on the servers.
        others: The variables that are not trained; None for the states of random generators.
        metrics: The variables of the metrics.
        tables: The trainable variables, by number, of which only the rows of a batch travel, and
            the layers that have them.
        optimizer: Sends gradients to the servers; None for a model without an optimizer.
    """

    model: bytes
    trainable: Sequence[Target]
    others: Sequence[Target | None]
    metrics: Sequence[Target]
    tables: dict[int, int]
    optimizer: Optimizer | None


class WorkerModel:
    """The steps of a model whose variables are on servers.

    Args:
        uid: The model's name, the same in every process.
        strategy: The strategy.
        recipe: What it is made of.
    """

    def __init__(self, uid: str, strategy: contracts.Strategy, recipe: Recipe) -> None:
        self._uid = uid
        self._strategy = strategy
        self._recipe = recipe
        self._has_rows = False
        self._known: keras.Model | None = None
        named_objects.register(uid, self)

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _get_or_create, (self._uid, self._strategy, self._recipe)

    @property
    def _model(self) -> keras.Model:
        if self._known is None:
            model = self._known = load_model(self._recipe.model)
            layers = model._flatten_layers()
            for number, place in self._recipe.tables.items():
                self._look_up_rows(layers[place], self._recipe.trainable[number])
        return self._known

    def _look_up_rows(self, layer: keras.layers.Embedding, table: Target) -> None:
        whole = layer.call

        def call(inputs: Any) -> jax.Array:
            if not self._has_rows:
                return whole(inputs)
            ids = keras.ops.cast(inputs, "int32")
            return keras.ops.cast(embedding_lookup(table, ids), layer.compute_dtype)

        layer.call = call

    # Steps, which `coordinator.schedule` runs on a worker.

    def train(self, data: Batch | Iterator[Batch], seeds: Seeds) -> Any:
        """Trains with a batch.

        Args:
            data: The batch, or the worker's own data, of which the next batch is taken.
            seeds: The states of the random generators, which are other ones at each step.

        Returns:
            What the model's `train_step` logs.
        """
        return self._run(self._train, data, seeds)

    def test(self, data: Batch | Iterator[Batch], seeds: Seeds) -> Any:
        """Evaluates a batch; see `train`."""
        return self._run(self._test, data, seeds)

    def predict(self, data: Batch | Iterator[Batch], seeds: Seeds) -> Any:
        """Returns what the model makes of a batch; see `train`."""
        return self._run(self._predict, data, seeds)

    def _run(
        self, step: Callable[[Batch, Seeds], Any], data: Batch | Iterator[Batch], seeds: Seeds
    ) -> Any:
        batch = next(data) if isinstance(data, Iterator) else data
        return self._strategy.run(step, args=(batch, seeds))

    # In the step.

    def _train(self, batch: Batch, seeds: Seeds) -> dict[str, Any]:
        others, metrics = self._read_others(seeds), self._read_metrics()
        is_plain = type(self._model).train_step is keras.Model.train_step
        run = self._differentiate if is_plain else self._call_train_step
        logs, grads, new_others, new_metrics = run(batch, others, metrics)
        optimizer = self._recipe.optimizer
        assert optimizer is not None
        pairs = zip(self._clip(grads), self._recipe.trainable, strict=True)
        optimizer.apply_gradients(list(pairs))
        self._send(others, new_others, metrics, new_metrics)
        return logs

    def _differentiate(
        self, batch: Batch, others: Values, metrics: Values
    ) -> tuple[dict[str, Any], Values, Values, Values]:
        """Runs Keras's own training step, with gradients of only the rows that are looked up."""
        model = self._model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)

        def compute_loss() -> tuple[jax.Array, tuple[Any, ...]]:
            values = self._read_trainable(rows=True)
            with self._looking_up_rows():
                result: tuple[jax.Array, tuple[Any, ...]] = model.compute_loss_and_updates(
                    values,
                    others,
                    metrics,
                    x,
                    y,
                    weight,
                    training=True,
                    optimizer_variables=[],
                )
            return result

        differentiated = value_and_grad(compute_loss, list(self._recipe.trainable), has_aux=True)
        (_, (loss, y_pred, others, metrics)), grads = differentiated()
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, weight)
        return logs, list(grads), others, metrics

    def _call_train_step(
        self, batch: Batch, others: Values, metrics: Values
    ) -> tuple[dict[str, Any], Values, Values, Values]:
        """Runs the user's training step; the gradients are what it gives the optimizer."""
        given: list[Values] = []

        def keep(variables: Values, grads: Values, trainable: Values) -> tuple[Values, Values]:
            given.append(list(grads))
            return list(trainable), list(variables)

        model = self._model
        state: tuple[Values, ...] = (self._read_trainable(rows=False), others, [], metrics)
        model.optimizer.stateless_apply = keep
        logs, (_, others, _, metrics) = model.train_step(state, batch)
        if len(given) != 1:
            raise RuntimeError(
                f"{model.name}.train_step: it has called optimizer.stateless_apply {len(given)} "
                "times. With ParameterServerStrategy a step sends one set of gradients to the "
                "servers: call it once."
            )
        return logs, given[0], others, metrics

    def _test(self, batch: Batch, seeds: Seeds) -> dict[str, Any]:
        others, metrics = self._read_others(seeds), self._read_metrics()
        with self._looking_up_rows():
            state = (self._read_trainable(rows=True), others, metrics)
            logs, (_, new_others, new_metrics) = self._model.test_step(state, batch)
        self._send(others, new_others, metrics, new_metrics)
        found: dict[str, Any] = logs
        return found

    def _predict(self, batch: Batch, seeds: Seeds) -> Any:
        with self._looking_up_rows():
            state = (self._read_trainable(rows=True), self._read_others(seeds))
            outputs, _ = self._model.predict_step(state, batch)
        return outputs

    @contextlib.contextmanager
    def _looking_up_rows(self) -> Iterator[None]:
        self._has_rows = True
        try:
            yield
        finally:
            self._has_rows = False

    def _read_trainable(self, rows: bool) -> Values:
        """Returns the values; for tables that are read by rows, zeros that are never used."""
        tables = self._recipe.tables if rows else {}
        return [
            jnp.zeros(variable.shape, variable.dtype) if number in tables else variable.value()
            for number, variable in enumerate(self._recipe.trainable)
        ]

    def _read_others(self, seeds: Seeds) -> Values:
        """Returns the values; random numbers are those of the step, whichever worker runs it."""
        states = iter(seeds)
        return [
            _begin_at(next(states)) if variable is None else variable.value()
            for variable in self._recipe.others
        ]

    def _read_metrics(self) -> Values:
        """Returns zeros for sums, so that what a step adds can be sent; values for the rest."""
        return [
            jnp.zeros(variable.shape, variable.dtype) if is_sum else variable.value()
            for variable, is_sum in zip(
                self._recipe.metrics,
                [own.aggregation == "sum" for own in self._model.metrics_variables],
                strict=True,
            )
        ]

    def _send(
        self, others: Values, new_others: Values, metrics: Values, new_metrics: Values
    ) -> None:
        """Sends what has changed, as a change: other workers send theirs at the same time."""
        variables = [*self._recipe.others, *self._recipe.metrics]
        old, new = [*others, *metrics], [*new_others, *new_metrics]
        for variable, before, after in zip(variables, old, new, strict=True):
            if variable is None or after is before:
                continue
            if jnp.issubdtype(variable.dtype, jnp.number):
                variable.assign_add(after - before)
            else:
                variable.assign(after)

    def _clip(self, grads: Values) -> Values:
        """Does to gradients what a Keras optimizer does before it updates."""
        optimizer = self._model.optimizer
        scale = optimizer.loss_scale_factor
        if scale is not None:
            grads = [None if grad is None else grad / scale for grad in grads]
        places = [number for number, grad in enumerate(grads) if grad is not None]
        clipped = optimizer._clip_gradients([grads[number] for number in places])
        found = dict(zip(places, clipped, strict=True))
        return [found.get(number) for number in range(len(grads))]


def _get_or_create(uid: str, strategy: contracts.Strategy, recipe: Recipe) -> WorkerModel:
    return named_objects.get_or_create(uid, lambda: WorkerModel(uid, strategy, recipe))


def _begin_at(state: jax.Array) -> jax.Array:
    """Returns a generator's state at the start of a step, far from those in other steps."""
    seed, step = jnp.asarray(state, jnp.uint32)
    key = jax.random.wrap_key_data(jnp.stack([seed, jnp.uint32(0)]), impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, step))

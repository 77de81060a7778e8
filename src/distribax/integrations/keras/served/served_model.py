"""A model in the coordinator's process: it schedules steps, and Keras sees their results."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import jax
import keras
import numpy as np

from distribax.coordinator import ClusterCoordinator, RemoteValue
from distribax.errors import OutOfRangeError
from distribax.execution import Function, named_objects
from distribax.integrations.keras.served.model_pickle import dump_model
from distribax.integrations.keras.served.predictions import Predictions
from distribax.integrations.keras.served.served_variables import (
    SeedVariable,
    find_target,
    keep_seed,
    serve,
)
from distribax.integrations.keras.served.update import KerasUpdate
from distribax.integrations.keras.served.worker_model import Recipe, WorkerModel
from distribax.integrations.keras.step_kinds import StepKind
from distribax.parameter_server.strategy import ParameterServerStrategy
from distribax.training.gradient_pairs import Target
from distribax.training.optimizer import Optimizer
from distribax.variables import Variable

_LARGE_BYTES = 1 << 20
"""From this size on, only the rows of an embedding that a batch mentions travel."""
_LOOK_SECONDS = 0.5
"""How often metrics are read while steps are under way, for the progress bar."""
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")

Logs: TypeAlias = dict[str, Any]


_known: weakref.WeakKeyDictionary[keras.Model, ServedModel] = weakref.WeakKeyDictionary()


def get_or_create(model: keras.Model, strategy: ParameterServerStrategy) -> ServedModel:
    """Returns the model's steps; new ones if it was compiled, or built, after the last ones."""
    known = _known.get(model)
    if known is None or not known.fits(model):
        if known is not None:
            known.join()
        known = _known[model] = ServedModel(model, strategy)
    return known


def join_all() -> None:
    """Waits for the steps of all models: several may have a variable in common."""
    for served in list(_known.values()):
        served.join()


class ServedModel:
    """The steps of a model, scheduled on workers.

    Args:
        model: The model; its variables are put on the servers.
        strategy: The strategy.

    Raises:
        ValueError: Something of the model, or of its optimizer, cannot be done on servers.
    """

    def __init__(self, model: keras.Model, strategy: ParameterServerStrategy) -> None:
        _check(model)
        self._parts = _list_parts(model)
        self._model: Callable[[], keras.Model | None] = weakref.ref(model)
        self._coordinator = ClusterCoordinator(strategy, view="none")
        self._is_busy = False
        # The states of the random generators, which go on when the model is compiled again.
        self._seeds: list[SeedVariable] = []
        self._next_look = 0.0
        self._last: tuple[Logs, RemoteValue] | None = None
        self._seen: dict[StepKind, Logs] = {}
        with strategy.scope():
            trainable = [self._serve(variable) for variable in model.trainable_variables]
            others = [self._serve_other(variable) for variable in model.non_trainable_variables]
            metrics = [self._serve(variable) for variable in model.metrics_variables]
            self._optimizer = self._serve_optimizer(model, trainable)
        tables = _find_tables(model, trainable)
        recipe = Recipe(dump_model(model), trainable, others, metrics, tables, self._optimizer)
        worker = WorkerModel(named_objects.make_uid(), strategy, recipe)
        steps = {
            StepKind.TRAIN: worker.train,
            StepKind.TEST: worker.test,
            StepKind.PREDICT: worker.predict,
        }
        self._functions: dict[StepKind, Callable[..., object]] = {
            kind: step if model.run_eagerly else Function(step) for kind, step in steps.items()
        }
        self._predictions = Predictions(self._fetch, 4 * strategy.engine.num_workers)

    def fits(self, model: keras.Model) -> bool:
        """Tells whether the steps are those of the model as it is now."""
        return [id(part) for part in self._parts] == [id(part) for part in _list_parts(model)]

    def _serve(self, variable: keras.Variable) -> Target:
        known = find_target(variable)
        if known is not None:
            return known
        value = np.asarray(variable.value)
        name = variable.path.replace("/", "_")
        target = cast(Target, Variable(value, trainable=variable.trainable, name=name))
        serve(variable, target, join_all)
        return target

    def _serve_other(self, variable: keras.Variable) -> Target | None:
        """Puts a variable that is not trained on the servers, but for random generators."""
        if variable.name != "seed_generator_state":
            return self._serve(variable)
        self._seeds.append(keep_seed(variable))
        return None

    def _serve_optimizer(self, model: keras.Model, trainable: Sequence[Target]) -> Optimizer | None:
        """Puts the optimizer's state on the servers; its variables read and write it there."""
        own = model.optimizer
        if own is None or not trainable:
            return None
        if not own.built:
            own.build(model.trainable_variables)
        update = KerasUpdate.of(own)
        rate = own._learning_rate
        is_number = isinstance(rate, keras.Variable)
        optimizer = Optimizer(update, learning_rate=float(rate.value) if is_number else 0.0)
        optimizer.build(trainable)
        begun = int(own._iterations.value) > 0
        slots = update.name_slots(model.trainable_variables)
        # The state ends with the number of updates and, by parameter, the slots.
        place = len(optimizer.variables) - len(slots)
        pairs = [(own._iterations, [optimizer.variables[place - 1]])]
        if is_number:
            pairs.append((rate, [optimizer.learning_rate]))
        rest = [v for v in own.variables if v is not own._iterations and v is not rate]
        pairs += _pair_slots(rest, slots, optimizer.variables[place:])
        for variable, targets in pairs:
            if begun:
                value = np.asarray(variable.value)
                for target in targets:
                    target.assign(value)
            serve(variable, targets[0], join_all)
        return optimizer

    # What Keras's loops call.

    def measure(self, kind: StepKind, batches: Iterable[Any], iterator: object | None) -> Logs:
        """Schedules steps of training or evaluation.

        Args:
            kind: What the steps do.
            batches: The batches, one for each step.
            iterator: The workers' own data, which the steps take instead; None to send the batches.

        Returns:
            The latest results of the metrics, which need not have all of these steps in them.
        """
        for batch in batches:
            result = self._schedule(kind, batch, iterator)
        seen = self._seen.get(kind)
        if seen is None:
            # Which names there are is known when a step has run.
            seen = self._seen[kind] = dict(self._fetch(result))
        if time.monotonic() >= self._next_look:
            seen.update(self._look(seen))
            self._next_look = time.monotonic() + _LOOK_SECONDS
        logs = dict(seen)
        self._last = logs, result
        return logs

    def predict(self, batches: Iterable[Any], iterator: object | None) -> list[Any]:
        """Schedules predictions, and returns them as arrays that are fetched when they are used."""
        return [
            self._predictions.add(self._schedule(StepKind.PREDICT, batch, iterator), batch)
            for batch in batches
        ]

    def _schedule(self, kind: StepKind, batch: Any, iterator: object | None) -> RemoteValue:
        data = jax.tree.map(np.asarray, batch) if iterator is None else iterator
        self._is_busy = True
        seeds = [seed.draw() for seed in self._seeds]
        with self._settling():
            return self._coordinator.schedule(self._functions[kind], (data, seeds))

    def join(self) -> None:
        """Waits until all steps have run."""
        if not self._is_busy:
            return
        self._is_busy = False
        with self._settling(join=False):  # When it raises, nothing is running any more.
            self._coordinator.join()
        if self._last is not None:
            logs, result = self._last
            self._last = None
            logs.update(self._fetch(result))
            model = self._model()
            if model is not None and self.fits(model):
                # The step itself has seen only its own batch.
                logs.update(self._look(logs))

    def _fetch(self, result: RemoteValue) -> Any:
        with self._settling():
            return result.fetch()

    @contextlib.contextmanager
    def _settling(self, *, join: bool = True) -> Iterator[None]:
        """Explains an error of the code inside, after the steps that are under way have ended.

        Args:
            join: Whether there may be such steps.
        """
        try:
            yield
        except Exception as error:
            self._is_busy, self._last = False, None
            if join:
                # The coordinator would raise the errors of this training in the next one.
                with contextlib.suppress(Exception):
                    self._coordinator.join()
            if not isinstance(error, OutOfRangeError):
                raise
            raise ValueError(
                "DatasetCreator: a worker's data set has ended before all steps were done. Let "
                "dataset_fn return a data set that repeats, dataset.repeat(), or ask for fewer "
                "steps (steps_per_epoch=, steps=)."
            ) from error

    def _look(self, names: Iterable[str]) -> Logs:
        """Returns the metrics of these names as they are by now on the servers."""
        model = self._model()
        assert model is not None
        mapping = []
        for variable in model.metrics_variables:
            target = find_target(variable)
            assert target is not None
            mapping.append((variable, jax.numpy.asarray(target.numpy())))
        with keras.StatelessScope(state_mapping=mapping):
            found: Logs = model.get_metrics_result()
        return {name: found[name] for name in names if name in found}


def _pair_slots(
    variables: Sequence[keras.Variable], names: Sequence[str], targets: Sequence[Target]
) -> list[tuple[keras.Variable, list[Target]]]:
    """Returns what an optimizer keeps, each with the slots on the servers that have the value.

    Slots are found by their names. Some optimizers give them others: these are in the same order,
    or there is one for all parameters.
    """
    own, served = Counter(variable.name for variable in variables), Counter(names)
    by_name = {
        name: target
        for name, target in zip(names, targets, strict=True)
        if own[name] == served[name] == 1
    }
    pairs = [(each, [by_name[each.name]]) for each in variables if each.name in by_name]
    others = [each for each in variables if each.name not in by_name]
    left = [target for name, target in zip(names, targets, strict=True) if name not in by_name]
    parts = [left] if len(others) == 1 else [[target] for target in left]
    found = list(zip(others, parts, strict=False))
    is_clear = len(others) == len(parts) and all(
        part and all(target.shape == tuple(each.shape) for target in part) for each, part in found
    )
    return pairs + found if is_clear else pairs


def _list_parts(model: keras.Model) -> list[Any]:
    """Returns the objects that steps are made for."""
    return [model.optimizer, model.loss, *model.variables, *model.metrics_variables]


def _check(model: keras.Model) -> None:
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise ValueError(
                f"{model.name}: {variable.path!r} has a constraint, which a parameter server, "
                "where the update runs, cannot apply. Leave it out, or use a regularizer."
            )
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{model.name}.compile: LossScaleOptimizer looks at the gradients of all variables at "
            "once, but on parameter servers each is updated where it lives. Use the policy "
            "'mixed_bfloat16', or loss_scale_factor= of the optimizer."
        )
    if optimizer is not None:
        _check_names(model)


def _check_names(model: keras.Model) -> None:
    """Refuses optimizers that look at the names of parameters, which servers do not know."""
    optimizer = model.optimizer
    for variable in model.trainable_variables:
        if _is_exception(optimizer, variable):
            raise ValueError(
                f"{model.name}.compile: the optimizer {optimizer.name!r} chooses by name what it "
                f"does to {variable.path!r}, but parameter servers do not know names. Leave out "
                "MultiOptimizer, exclude_from_weight_decay(), exclude_layers= and "
                "exclude_embeddings=."
            )


def _is_exception(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    # Old versions of Keras lack some.
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        return True
    if optimizer.weight_decay is not None and not optimizer._use_weight_decay(variable):
        return True
    is_muon = isinstance(optimizer, getattr(keras.optimizers, "Muon", ()))
    return is_muon and len(variable.shape) == 2 and bool(optimizer._should_use_adamw(variable))


def _find_tables(model: keras.Model, trainable: Sequence[Target]) -> dict[int, int]:
    """Returns the embeddings of which only rows are needed: their numbers, and their layers'."""
    optimizer = model.optimizer
    if optimizer is not None and any(getattr(optimizer, name) is not None for name in _CLIPPING):
        return {}
    numbers = {id(variable): place for place, variable in enumerate(model.trainable_variables)}
    tables: dict[int, int] = {}
    for place, layer in enumerate(model._flatten_layers()):
        if type(layer) is not keras.layers.Embedding or layer.embeddings_regularizer is not None:
            continue
        number = numbers.get(id(layer.embeddings))
        if number is None or getattr(layer, "lora_enabled", False):
            continue
        target = trainable[number]
        size = int(np.prod(target.shape)) * target.dtype.itemsize
        if not isinstance(target, Variable) or size >= _LARGE_BYTES:
            tables[number] = place
    return tables

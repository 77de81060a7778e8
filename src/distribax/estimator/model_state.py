"""What a model function creates on its first run under a strategy, and finds again later."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from typing_extensions import override

from distribax.context import reuse
from distribax.contrib.distribute import variable_store
from distribax.training.gradients import AnyVariable
from distribax.training.hyperparameters import run_now
from distribax.training.metrics import Metric
from distribax.variables import ShardedVariable, Variable

_T = TypeVar("_T")


class ModelState(Mapping[str, Any]):
    """The objects that a model function has created, as a checkpoint saves them: by name.

    A name that is asked for several times in one run gets a number: `w`, `w_1`. Metrics are found
    again, but are not part of the model.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Any] = {}
        self._given: Counter[tuple[str, str]] = Counter()
        self.metrics: dict[str, Metric] = {}
        self.global_step = Variable(
            0, trainable=False, name="global_step", aggregation="ONLY_FIRST_REPLICA"
        )

    def get_or_create(self, kind: type, name: str | None, create: Callable[[], Any]) -> Any:
        """Returns the object of a kind and name that this run has not been given yet."""
        asked = (kind.__name__, name or kind.__name__)
        number = self._given[asked]
        self._given[asked] += 1
        key = (asked[0], f"{asked[1]}_{number}" if number else asked[1])
        if key not in self._kept:
            # What the object creates itself belongs to the object.
            with reuse.reuse_from(None):
                self._kept[key] = create()
        return self._kept[key]

    @contextlib.contextmanager
    def one_run(self) -> Iterator[None]:
        """Marks one run of the model function."""
        self._given.clear()
        with reuse.reuse_from(self), variable_store.use_fresh_store():
            yield

    @property
    def objects(self) -> dict[str, Any]:
        """The model, by name: variables, optimizers and models of other libraries."""
        owned = {
            id(variable)
            for kept in self._kept.values()
            if not isinstance(kept, (Variable, ShardedVariable)) and hasattr(kept, "variables")
            for variable in kept.variables
        }
        model = {
            name: kept
            for (_, name), kept in self._kept.items()
            if id(kept) not in owned and not hasattr(kept, "reset_state")
        }
        return {"global_step": self.global_step} | model

    @property
    def variables(self) -> list[AnyVariable]:
        """The variables that the model function has created itself."""
        return [
            kept
            for name, kept in self.objects.items()
            if isinstance(kept, (Variable, ShardedVariable)) and name != "global_step"
        ]

    @override
    def __getitem__(self, name: str) -> Any:
        return self.objects[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.objects)

    @override
    def __len__(self) -> int:
        return len(self.objects)


def _get_state(what: str) -> ModelState:
    state = reuse.get_reused_objects()
    if not isinstance(state, ModelState):
        raise RuntimeError(
            f"{what}: called outside of a model function. Call it in the model_fn of an Estimator."
        )
    return state


def get_global_step() -> Variable:
    """Returns the variable that counts the steps of the training; the Estimator counts.

    Raises:
        RuntimeError: It is called outside of a model function.
    """
    return _get_state("get_global_step").global_step


def trainable_variables() -> list[AnyVariable]:
    """Returns the trainable variables that the model function has created so far.

    Raises:
        RuntimeError: It is called outside of a model function.
    """
    return [each for each in _get_state("trainable_variables").variables if each.trainable]


def get_or_create(name: str, create: Callable[[], _T]) -> _T:
    """Returns an object of a model function that is created on its first run only.

    `dx.Variable`s, `get_variable`, `dx.Optimizer`s and metrics do not need it. Models and
    optimizers of other libraries (Flax NNX, Keras) do: another run would create others.

    Args:
        name: The name, which is that of the object in checkpoints.
        create: A function without arguments that creates it.

    Returns:
        What `create` has returned the first time.

    Raises:
        RuntimeError: It is called outside of a model function.
    """
    state = _get_state("get_or_create")
    made: _T = state.get_or_create(object, name, lambda: run_now(create))
    return made

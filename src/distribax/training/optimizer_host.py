"""Optimizers whose updates run in other processes, beside the variables."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import jax

from distribax.training.gradient_pairs import Grad, Target
from distribax.training.optimizer_state import StateLayout
from distribax.variables import Variable

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class UpdateSettings:
    """How an optimizer updates one list of variables.

    Attributes:
        uid: The optimizer's name, the same in every process.
        transformation: The optax transformation, with support for extra arguments.
        targets: The variables.
        layout: Which target each leaf of the transformation's state belongs to.
        state: The leaves of the state, as shapes and data types.
        name: What the slots' names begin with.
        counter: A variable that counts the updates, if there is one already.
    """

    uid: str
    transformation: optax.GradientTransformationExtraArgs
    targets: Sequence[Target]
    layout: StateLayout
    state: Sequence[jax.ShapeDtypeStruct]
    name: str
    counter: Variable | None


class RemoteUpdate(Protocol):
    """An optimizer's update that runs in other processes."""

    counter: Variable
    """The variable that counts the updates."""
    slots: list[Target]
    """The optimizer's state, as variables."""

    def apply(self, grads: Sequence[Grad | None], extra_args: Mapping[str, jax.Array]) -> None:
        """Sends the gradients to where the variables are."""


class OptimizerHost(abc.ABC):
    """The extended interface of a strategy whose variables are updated where they live."""

    @abc.abstractmethod
    def create_update(self, settings: UpdateSettings) -> RemoteUpdate:
        """Returns the update of an optimizer for variables of the strategy."""

    @abc.abstractmethod
    def find_targets(self, uid: str) -> list[Target] | None:
        """Returns the variables that an optimizer was built for in another process, or None."""

"""What a checkpoint saves: variables, iterators and values, found in any objects, by name."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from distribax import contracts, jax_private
from distribax.execution import Function
from distribax.training.gradients import AnyVariable
from distribax.types import VariableAggregation
from distribax.variables import ShardedVariable, Variable

Put: TypeAlias = Callable[[Any], None]
"""Replaces a value where it is kept."""

_NUMBERS = (bool, int, float, complex, np.generic)


@runtime_checkable
class Positioned(Protocol):
    """Anything with a position that can be saved: an iterator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@runtime_checkable
class Feeding(Protocol):
    """An iterator that knows whom it feeds, and so which workers move it together."""

    @property
    def input_target(self) -> contracts.InputTarget: ...


@runtime_checkable
class Stateful(Protocol):
    """Anything that keeps its state in variables: an optimizer, a metric."""

    @property
    def variables(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class VariableSlot:
    """A variable: one value, whatever the number of its copies and shards."""

    variable: AnyVariable

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a saved value must have."""
        return self.variable.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The data type that a saved value becomes."""
        return np.dtype(self.variable.dtype)

    @property
    def described(self) -> str:
        """The variable as error messages name it."""
        return self.variable.described

    @property
    def strategy(self) -> contracts.Strategy:
        """The strategy that the variable belongs to."""
        return self.variable.distribute_strategy

    def stop_waiting(self) -> None:
        """Tells the variable that whoever waits for new variables has seen it."""
        if isinstance(self.variable, Variable):
            self.variable.stop_waiting()

    def read(self) -> np.ndarray:
        """Returns the value to save. With several workers all of them call it."""
        variable = self.variable
        is_combined = variable.aggregation is not VariableAggregation.NONE
        if isinstance(variable, Variable) and variable.per_replica and not is_combined:
            return variable.values[0].numpy()
        return variable.numpy()

    def write(self, value: np.ndarray, is_first: bool) -> None:
        """Puts a saved value back; `is_first` tells whether this is the first worker."""
        variable = self.variable
        value = value.astype(variable.dtype)
        is_sum = variable.per_replica and variable.aggregation is VariableAggregation.SUM
        if not (isinstance(variable, Variable) and is_sum):
            variable.assign(value)
            return
        # The first replica gets the whole sum: parts of it would lose what does not divide evenly.
        stored = variable.share()
        new = [np.zeros_like(value) for _ in variable.placement.split(stored)]
        if is_first:
            new[0] = value
        variable.store(variable.placement.join([jnp.asarray(piece) for piece in new], stored))


@dataclasses.dataclass(frozen=True)
class ValueSlot:
    """An array or a number, which is replaced where it is kept."""

    name: str
    value: Any
    put: Put

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that a saved value must have."""
        return np.shape(_to_data(self.value))

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The data type that a saved value becomes; None if it keeps its own."""
        return None if self._is_number else np.dtype(_to_data(self.value).dtype)

    @property
    def _is_number(self) -> bool:
        """Whether it is a Python number, whose type may change."""
        return isinstance(self.value, _NUMBERS) and not isinstance(self.value, np.generic)

    @property
    def described(self) -> str:
        """The value as error messages name it."""
        return f"the value {self.name!r} of shape {self.shape}"

    def read(self) -> np.ndarray:
        """Returns the value to save."""
        data = _to_data(self.value)
        return np.array(jax_private.pick_copy(data) if isinstance(data, jax.Array) else data)

    def write(self, value: np.ndarray, is_first: bool) -> None:
        """Puts a saved value back, in every worker."""
        old = self.value
        if self._is_number:
            number = value.item()
            # As it was set here, unless it would lose its fraction.
            self.put(type(old)(number) if type(old)(number) == number else number)
        elif isinstance(old, (np.ndarray, np.generic)):
            self.put(np.asarray(value, old.dtype)[() if isinstance(old, np.generic) else ...])
        elif jax_private.is_key(old):
            self.put(jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(old)))
        else:
            self.put(jax.device_put(np.asarray(value, old.dtype), old.sharding))


class ForeignSlot(abc.ABC):
    """A variable of another library; the members are those of `VariableSlot`."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape that a saved value must have."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The data type that a saved value becomes."""

    @property
    @abc.abstractmethod
    def described(self) -> str:
        """The variable as error messages name it."""

    @property
    @abc.abstractmethod
    def strategy(self) -> contracts.Strategy | None:
        """The strategy that the variable belongs to."""

    @abc.abstractmethod
    def stop_waiting(self) -> None:
        """Tells the variable that whoever waits for new variables has seen it."""

    @abc.abstractmethod
    def read(self) -> np.ndarray:
        """Returns the value to save."""

    @abc.abstractmethod
    def write(self, value: np.ndarray, is_first: bool) -> None:
        """Puts a saved value back, in every worker."""


Slot: TypeAlias = VariableSlot | ForeignSlot | ValueSlot
"""A place whose value is saved as one array."""


def _to_data(value: Any) -> Any:
    """Returns a value as numbers: the numbers of random keys."""
    return jax.random.key_data(value) if jax_private.is_key(value) else value


@dataclasses.dataclass
class Tracked:
    """All that a checkpoint saves, by name."""

    slots: dict[str, Slot] = dataclasses.field(default_factory=dict)
    iterators: dict[str, Positioned] = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> list[AnyVariable]:
        """The variables among the slots."""
        return [slot.variable for slot in self.slots.values() if isinstance(slot, VariableSlot)]

    @property
    def strategies(self) -> list[contracts.Strategy]:
        """The strategies that the variables belong to, each once."""
        found = (slot.strategy for slot in self.slots.values() if not isinstance(slot, ValueSlot))
        return list({id(each): each for each in found if each is not None}.values())


Tracker: TypeAlias = Callable[[Any], Iterable[tuple[str, Any, Put]]]
"""Returns what is in an object of another library: names, values, and how to replace them.

An empty name stands for the object's own.
"""

_trackers: dict[type, Tracker] = {}


def register_tracker(kind: type, tracker: Tracker) -> None:
    """Says what a checkpoint saves of objects of a type of another library."""
    _trackers[kind] = tracker


def find_tracked(
    objects: Mapping[str, object], put: Callable[[str, Any], None], root: object = None
) -> Tracked:
    """Returns all that can be saved in some objects.

    Args:
        objects: The objects, by name.
        put: Replaces one of them, for values that cannot be changed in place.
        root: An object whose parts are saved under their own names.

    Raises:
        TypeError: Something in them cannot be saved.
    """
    search = _Search()
    search.visit_root(root)
    for name, value in objects.items():
        search.visit(name, value, lambda new, name=name: put(name, new))  # type: ignore[misc]
    return search.tracked


class _Search:
    """One walk through all objects."""

    def __init__(self) -> None:
        self.tracked = Tracked()
        # The objects on the way to the current one: an object may refer to its owner.
        self._above: set[int] = set()

    def visit_root(self, root: object) -> None:
        """Records what is in an object, without a name before the names of its parts."""
        if isinstance(root, (Variable, ShardedVariable, Positioned, jax.Array, *_NUMBERS)):
            raise TypeError(
                f"dx.Checkpoint: the root is a {type(root).__name__}, which has no parts. Give it "
                "a name, for example dx.Checkpoint(v=v)."
            )
        self.visit("", root, _refuse_root)

    def visit(self, name: str, value: Any, put: Put) -> None:
        """Records what is in a value."""
        if not self._try(name, value, put):
            raise TypeError(
                f"dx.Checkpoint: {name or 'the root'} is a {type(value).__name__}, which cannot be "
                "saved. Expected variables, arrays, numbers, iterators, optimizers, metrics, "
                "models, objects with these as attributes, or lists, tuples and dicts of them."
            )

    def _try(self, name: str, value: Any, put: Put) -> bool:
        """Records what is in a value; False if there is nothing that can be saved."""
        if value is None:
            return True
        if isinstance(value, (Variable, ShardedVariable)):
            self.tracked.slots[name] = VariableSlot(value)
            return True
        if isinstance(value, ForeignSlot):
            self.tracked.slots[name] = value
            return True
        if isinstance(value, Positioned):
            self.tracked.iterators[name] = value
            return True
        if isinstance(value, (jax.Array, np.ndarray, *_NUMBERS)):
            self.tracked.slots[name] = ValueSlot(name, value, put)
            return True
        if id(value) in self._above:
            return True
        self._above.add(id(value))
        try:
            return self._enter(name, value, put)
        finally:
            self._above.discard(id(value))

    def _enter(self, name: str, value: Any, put: Put) -> bool:
        if isinstance(value, (type, Function, FunctionType, MethodType, ModuleType)):
            return False
        for kind, tracker in _trackers.items():
            if isinstance(value, kind):
                for path, part, replace in tracker(value):
                    self.visit(_join(name, path), part, replace)
                return True
        if isinstance(value, (Mapping, list)):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                self.visit(_join(name, key), item, _make_item_put(value, key, name))
            return True
        if isinstance(value, Stateful) and not _is_pytree(value):
            for index, variable in enumerate(value.variables):
                self.visit(_join(name, index), variable, put)
            return True
        if _is_pytree(value):
            self._enter_pytree(name, value, put)
            return True
        return self._enter_object(name, value)

    def _enter_pytree(self, name: str, value: Any, put: Put) -> None:
        """Visits the parts of a tuple, an optax state or the like, which is replaced as a whole."""
        paths, tree = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda part: part is not value
        )
        parts = [part for _, part in paths]

        def make_put(index: int) -> Put:
            def replace(new: Any) -> None:
                parts[index] = new
                put(jax.tree.unflatten(tree, parts))

            return replace

        for index, (path, part) in enumerate(paths):
            self.visit(_join(name, _format_key(path[-1])), part, make_put(index))

    def _enter_object(self, name: str, value: Any) -> bool:
        """Visits the attributes of a plain object; those that cannot be saved are left out."""
        found = False
        for key, item in getattr(value, "__dict__", {}).items():
            if item is None or (name and isinstance(item, _NUMBERS)):
                continue  # Settings of the object, not state of the training.
            before = len(self.tracked.slots) + len(self.tracked.iterators)
            try:
                self._try(_join(name, key), item, _make_attribute_put(value, key))
            except TypeError:
                continue  # A list of strings, for example.
            found |= len(self.tracked.slots) + len(self.tracked.iterators) > before
        # An object that has no variables yet may get them.
        return found or hasattr(value, "__dict__")


def _join(name: str, part: object) -> str:
    """Returns the name of a part of what has a name; an empty name stands for nothing."""
    return ".".join(each for each in (name, str(part)) if each)


def _refuse_root(new: object) -> None:
    raise TypeError(
        f"Checkpoint.restore: the root is a {type(new).__name__}, which cannot be changed. Give "
        "it a name, for example dx.Checkpoint(state=state)."
    )


def _is_pytree(value: object) -> bool:
    return not jax.tree_util.all_leaves([value])


def _format_key(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _make_item_put(container: Any, key: Any, name: str) -> Put:
    def put(new: Any) -> None:
        if not isinstance(container, (list, MutableMapping)):
            raise TypeError(
                f"Checkpoint.restore: {name}.{key} is a value in a {type(container).__name__}, "
                "which cannot be changed. Keep it in a dict or a dx.Variable."
            )
        container[key] = new

    return put


def _make_attribute_put(owner: object, name: str) -> Put:
    return lambda new: setattr(owner, name, new)

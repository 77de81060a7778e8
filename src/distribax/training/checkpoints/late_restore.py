"""Restored values of variables that do not exist yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from distribax import context
from distribax.training.checkpoints.tracked import Slot, Tracked, ValueSlot, find_tracked
from distribax.variables import ShardedVariable, Variable, late_values


class Restored(Protocol):
    """What was restored, and may be given more objects since."""

    def find_tracked(self) -> Tracked: ...


Check = Callable[[Mapping[str, Slot], Mapping[str, np.ndarray]], None]
"""Raises ValueError if a value does not fit its variable."""

_COMPLETE = (
    Variable,
    ShardedVariable,
    jax.Array,
    np.ndarray,
    np.generic,
    bool,
    int,
    float,
    complex,
)


class LateRestore:
    """Gives variables that are created after a restore their values.

    The values wait as long as the checkpoint exists, or an object in which variables may appear
    (but for plain dicts, lists and tuples); that they wait keeps nothing alive.

    Args:
        checkpoint: What was restored.
        objects: What it consists of, by name.
        root: What else it consists of.
        values: The values that wait, by name.
        is_first_worker: Whether this is the first worker.
        check: Raises ValueError if a value does not fit its variable.
    """

    def __init__(
        self,
        checkpoint: Restored,
        objects: Mapping[str, object],
        root: object,
        values: dict[str, np.ndarray],
        is_first_worker: bool,
        check: Check,
    ) -> None:
        self.values = values
        self._checkpoint = weakref.ref(checkpoint)
        parts = {name: part for name, part in objects.items() if not isinstance(part, _COMPLETE)}
        self._objects = {name: _refer(part) for name, part in parts.items()}
        self._root = _refer(root)
        self._is_first_worker = is_first_worker
        self._check = check
        if values:
            # Another restore of the same objects takes the place of this one.
            if root is None and not parts:
                root = checkpoint
            ids = [(name, id(part)) for name, part in (*parts.items(), ("", root))]
            late_values.wait_for_variables(self, tuple(ids))

    def give_late_values(self) -> None:
        """Gives variables that exist by now the values that were restored before."""
        checkpoint = self._checkpoint()
        objects = {name: find() for name, find in self._objects.items()}
        root = self._root()
        if checkpoint is None and root is None and all(part is None for part in objects.values()):
            self.forget()
            return
        if checkpoint is None:
            tracked = find_tracked(objects, lambda *_: None, root)
        else:
            tracked = checkpoint.find_tracked()
        for name, slot in tracked.slots.items():
            if isinstance(slot, ValueSlot):
                continue
            slot.stop_waiting()
            if name in self.values:
                value = self.values.pop(name)
                self._check({name: slot}, {name: value})
                with context.enter(context.Entry(slot.strategy or context.get_strategy())):
                    slot.write(value, self._is_first_worker)
        if not self.values:
            late_values.stop_waiting(self)

    def forget(self) -> None:
        """Gives up the values that nothing has been created for."""
        self.values.clear()
        late_values.stop_waiting(self)


def _refer(value: object) -> Callable[[], Any]:
    """Returns what finds an object as long as it exists, or never if nobody can know that."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None

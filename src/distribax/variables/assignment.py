"""Assigning: how a variable, or a part of one, is written as a whole."""

from __future__ import annotations

import abc
from typing import Generic, TypeVar

from distribax.types import WriteKind
from distribax.variables.context_rules import Assigned

_Variable = TypeVar("_Variable")


class Assignable(Generic[_Variable]):
    """TensorFlow's `assign`, `assign_add` and `assign_sub`, which return the variable."""

    @abc.abstractmethod
    def _write(self, kind: WriteKind, value: Assigned) -> _Variable:
        """Writes a value, and returns the variable."""

    def assign(
        self,
        value: Assigned,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> _Variable:
        """Replaces the value. In a replica the aggregation says how the replicas' are combined.

        Args:
            value: The new value, of the same shape; a scalar will do for a part such as `v[0]`.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.
            read_value: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable.

        Raises:
            ValueError: The value's shape or type does not fit, or the aggregation does not say how
                the replicas' values become one.
        """
        return self._write(WriteKind.ASSIGN, value)

    def assign_add(
        self,
        delta: Assigned,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> _Variable:
        """Adds `delta` to the value.

        Args:
            delta: What to add, of the same shape or a scalar.
            use_locking: As for `assign`.
            name: As for `assign`.
            read_value: As for `assign`.

        Returns:
            The variable.

        Raises:
            ValueError: As for `assign`.
        """
        return self._write(WriteKind.ASSIGN_ADD, delta)

    def assign_sub(
        self,
        delta: Assigned,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> _Variable:
        """Subtracts `delta` from the value.

        Args:
            delta: What to subtract, of the same shape or a scalar.
            use_locking: As for `assign`.
            name: As for `assign`.
            read_value: As for `assign`.

        Returns:
            The variable.

        Raises:
            ValueError: As for `assign`.
        """
        return self._write(WriteKind.ASSIGN_SUB, delta)

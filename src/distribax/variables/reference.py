"""References to variables, which compare and hash by identity."""

from __future__ import annotations

from typing import Generic, TypeVar

from typing_extensions import override

_V = TypeVar("_V")


class Reference(Generic[_V]):
    """Stands for a variable itself, not for its value: equal to another one of the same variable.

    Args:
        target: The variable.
    """

    __slots__ = ("_target",)

    def __init__(self, target: _V) -> None:
        self._target = target

    def deref(self) -> _V:
        """Returns the variable.

        Returns:
            What `ref()` was called on.
        """
        return self._target

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._target is other._target

    @override
    def __hash__(self) -> int:
        return id(self._target)

    @override
    def __repr__(self) -> str:
        return f"<Reference wrapping {self._target!r}>"

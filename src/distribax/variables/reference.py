"""References to variables, which compare and hash by identity."""

from __future__ import annotations

from typing import TypeVar

from typing_extensions import override

from distribax.types import Identity

_V = TypeVar("_V")


class Reference(Identity[_V]):
    """Stands for a variable itself, not for its value: equal to another one of the same variable.

    Args:
        target: The variable.
    """

    __slots__ = ()

    def deref(self) -> _V:
        """Returns the variable.

        Returns:
            What `ref()` was called on.
        """
        return self.target

    @override
    def __repr__(self) -> str:
        return f"<Reference wrapping {self.target!r}>"

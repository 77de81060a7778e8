"""What the parts of the library expect of each other: protocols that every layer is typed against.

A lower layer that works with a variable, a strategy or a source never imports the class of a higher
one: it names the protocol here, and says with it what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import jax


class RemoteUpdate(Protocol):
    """An optimizer's update that runs in other processes, beside the variables."""

    counter: Any
    """The variable that counts the updates."""
    slots: list[Any]
    """The optimizer's state, as variables."""

    def apply(self, grads: Sequence[jax.Array | None], extra_args: Mapping[str, jax.Array]) -> None:
        """Sends the gradients to where the variables are."""

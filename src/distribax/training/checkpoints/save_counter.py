"""How often a checkpoint was saved."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax.values import ArrayLike


class SaveCounter(ArrayLike):
    """The number of saves, kept on the host; it reads as an integer or an array."""

    def __init__(self) -> None:
        self.value = 0

    @override
    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    @override
    def numpy(self) -> np.ndarray:
        """Returns the number as a NumPy array."""
        return np.asarray(self.value)

    @override
    def __eq__(self, other: object) -> bool:
        return bool(self.value == other)

    @override
    def __hash__(self) -> int:
        return id(self)

    @override
    def __repr__(self) -> str:
        return f"<save_counter {self.value}>"

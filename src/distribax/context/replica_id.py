"""`ReplicaId`: the index of an eager replica, which computes like the traced one of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import jax_private
from distribax.values.arithmetic import Operators

_NUMBERS = (bool, int, float, complex, np.generic)
_COMPARISONS = frozenset(
    (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
)


class ReplicaId(Operators, int):  # type: ignore[misc]  # Powers of ints take a modulus, too.
    """The index of a replica that runs eagerly: an int that computes like an array.

    It counts, indexes, hashes and prints like an int. What is computed with it is an array of the
    replica's own, as in a compiled step, where the index is an array too: replicas that write
    `id + 1` write different values. Comparisons give truth values that `if` and `jnp.where` take.
    """

    @property
    def array(self) -> jax.Array:
        """The index as an array, of the type that it has in a compiled step."""
        with jax.ensure_compile_time_eval():
            return jnp.asarray(int(self), jnp.int32)

    @override
    def _operate(self, op: Callable[..., Any], *operands: Any) -> Any:
        if not all(isinstance(each, (*_NUMBERS, jax.Array)) for each in operands):
            return NotImplemented
        if op in _COMPARISONS and not any(isinstance(each, jax.Array) for each in operands):
            return np.bool_(op(*(int(x) if isinstance(x, int) else x for x in operands)))
        arrays = [each.array if isinstance(each, ReplicaId) else each for each in operands]
        if any(map(jax_private.is_tracer, arrays)):
            return op(*arrays)
        # Of numbers it is a number also in code that is traced.
        with jax.ensure_compile_time_eval():
            return op(*arrays)

    __hash__ = int.__hash__

    def __getattr__(self, name: str) -> Any:
        # What arrays have and ints do not: `astype`, `shape`, `dtype`.
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.array, name)

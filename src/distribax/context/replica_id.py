"""`ReplicaId`: the index of an eager replica, which computes like the traced one of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_NUMBERS = (bool, int, float, complex, np.generic)


def _compute(op: Callable[..., Any], *operands: Any) -> Any:
    """Applies `op` to arrays; of numbers it is a number also in code that is traced."""
    if any(isinstance(operand, jax.core.Tracer) for operand in operands):
        return op(*operands)
    with jax.ensure_compile_time_eval():
        return op(*operands)


def _binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(self: ReplicaId, other: object) -> Any:
        if isinstance(other, (*_NUMBERS, jax.Array)):
            return _compute(op, self.array, _plain(other))
        return NotImplemented

    return apply


def _reflected(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(self: ReplicaId, other: object) -> Any:
        if isinstance(other, (*_NUMBERS, jax.Array)):
            return _compute(op, _plain(other), self.array)
        return NotImplemented

    return apply


def _unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _compute(op, self.array)


def _comparison(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(self: ReplicaId, other: object) -> Any:
        if isinstance(other, _NUMBERS):
            return np.bool_(op(int(self), int(other) if isinstance(other, int) else other))
        return _compute(op, self.array, other) if isinstance(other, jax.Array) else NotImplemented

    return apply


def _plain(number: Any) -> Any:
    """Returns the index of a replica as an array, and any other number as it is."""
    return number.array if isinstance(number, ReplicaId) else number


class ReplicaId(int):
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

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __divmod__, __rdivmod__ = _binary(divmod), _reflected(divmod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)  # type: ignore[assignment]
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __hash__ = int.__hash__

    def __getattr__(self, name: str) -> Any:
        # What arrays have and ints do not: `astype`, `shape`, `dtype`.
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.array, name)

"""Operators and conversions for objects that stand for one array."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import override


def _binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(self: ArrayLike, other: object) -> Any:
        return op(self.__jax_array__(), _unwrap(other))

    return apply


def _reflected(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(self: ArrayLike, other: object) -> Any:
        return op(_unwrap(other), self.__jax_array__())

    return apply


def _unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(self: ArrayLike) -> Any:
        return op(self.__jax_array__())

    return apply


def _unwrap(value: object) -> object:
    return value.__jax_array__() if isinstance(value, ArrayLike) else value


def _forward(name: str) -> Any:
    def call(self: ArrayLike, *args: object, **kwargs: object) -> Any:
        return getattr(jnp.asarray(self.__jax_array__()), name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Like `jax.Array.{name}`, on the value."
    return call


class ArrayLike:
    """Lets `x @ w + b`, `float(w)`, `np.asarray(w)` and f-strings work on a wrapped array.

    Subclasses say what the array is (`__jax_array__`) and how the host reads it (`numpy`).
    """

    # NumPy must leave `ndarray + variable` to the operators below.
    __array_priority__ = 1000.0

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its array is: define __jax_array__(self)."
        )

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array of its own."""
        return np.array(self.__jax_array__())

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)

    sum, mean, max, min = map(_forward, ("sum", "mean", "max", "min"))
    reshape, astype, ravel = map(_forward, ("reshape", "astype", "ravel"))
    transpose, dot, squeeze = map(_forward, ("transpose", "dot", "squeeze"))

    @property
    def T(self) -> jax.Array:
        """The value with its dimensions reversed."""
        return self.transpose()

    def __getitem__(self, index: object) -> jax.Array:
        return jnp.asarray(self.__jax_array__())[index]

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __iter__(self) -> Iterator[Any]:
        return iter(jnp.asarray(self.__jax_array__()))

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __index__(self) -> int:
        return operator.index(self.numpy().item())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def item(self) -> Any:
        """Returns the value of a scalar as a Python number."""
        return self.numpy().item()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    @override
    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

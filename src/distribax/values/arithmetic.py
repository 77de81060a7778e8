"""Operators and conversions for objects that stand for one array."""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import override

from distribax import jax_private


def _make_binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._operate(op, self, other)


def _make_reflected(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._operate(op, other, self)


def _make_unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: self._operate(op, self)


class Operators:
    """The operators of arrays, of which a subclass says what they do with their operands."""

    @abc.abstractmethod
    def _operate(self, op: Callable[..., Any], *operands: Any) -> Any:
        """Returns the result of an operator; one of the operands is the object itself."""

    __add__, __radd__ = _make_binary(operator.add), _make_reflected(operator.add)
    __sub__, __rsub__ = _make_binary(operator.sub), _make_reflected(operator.sub)
    __mul__, __rmul__ = _make_binary(operator.mul), _make_reflected(operator.mul)
    __truediv__, __rtruediv__ = _make_binary(operator.truediv), _make_reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = (
        _make_binary(operator.floordiv),
        _make_reflected(operator.floordiv),
    )
    __mod__, __rmod__ = _make_binary(operator.mod), _make_reflected(operator.mod)
    __pow__, __rpow__ = _make_binary(operator.pow), _make_reflected(operator.pow)
    __matmul__, __rmatmul__ = _make_binary(operator.matmul), _make_reflected(operator.matmul)
    __and__, __rand__ = _make_binary(operator.and_), _make_reflected(operator.and_)
    __or__, __ror__ = _make_binary(operator.or_), _make_reflected(operator.or_)
    __xor__, __rxor__ = _make_binary(operator.xor), _make_reflected(operator.xor)
    __lshift__, __rlshift__ = _make_binary(operator.lshift), _make_reflected(operator.lshift)
    __rshift__, __rrshift__ = _make_binary(operator.rshift), _make_reflected(operator.rshift)
    __divmod__, __rdivmod__ = _make_binary(divmod), _make_reflected(divmod)
    __lt__, __le__ = _make_binary(operator.lt), _make_binary(operator.le)
    __gt__, __ge__ = _make_binary(operator.gt), _make_binary(operator.ge)
    __neg__, __pos__ = _make_unary(operator.neg), _make_unary(operator.pos)
    __abs__, __invert__ = _make_unary(operator.abs), _make_unary(operator.invert)
    __eq__, __ne__ = _make_binary(operator.eq), _make_binary(operator.ne)


def _unwrap(value: object) -> object:
    return value.__jax_array__() if isinstance(value, ArrayLike) else value


def _forward(name: str) -> Any:
    def call(self: ArrayLike, *args: object, **kwargs: object) -> Any:
        return getattr(jnp.asarray(self.__jax_array__()), name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Like `jax.Array.{name}`, on the value."
    return call


def _forward_property(name: str) -> Any:
    def get(self: ArrayLike) -> Any:
        return getattr(jnp.asarray(self.__jax_array__()), name)

    return property(get, doc=f"Like `jax.Array.{name}`, of the value.")


def unwrap_index(index: object) -> Any:
    """Returns an index in which what stands for an array is that array."""
    if isinstance(index, tuple):
        return tuple(map(_unwrap, index))
    return _unwrap(index)


class ArrayLike(Operators):
    """Lets an object be used where the array that it stands for can: by JAX, NumPy and Python.

    Subclasses say what the array is (`__jax_array__`) and how the host reads it (`numpy`). JAX
    takes them as arrays and as leaves of nests, so that functions of `jax.numpy`, `jax.jit` and
    `jax.grad` get the array, and `jax.tree.map` the object.
    """

    # NumPy must leave `ndarray + variable` to our operators.
    __array_priority__ = 1000.0

    @property
    def has_copies(self) -> bool:
        """Whether every replica has a copy on its device, as of a mirrored variable."""
        return False

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its array is: define __jax_array__(self)."
        )

    def jax_type(self) -> Any:
        """Returns the type of the array, as `jax.typeof` does."""
        return jax.typeof(self.__jax_array__())

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array of its own."""
        return np.array(self.__jax_array__())

    @override
    def _operate(self, op: Callable[..., Any], *operands: Any) -> Any:
        return op(*map(_unwrap, operands))

    # Compared by value like arrays, and hashed by identity: they can be keys of dicts and elements
    # of sets, but `in` and `index` of a list compare values.
    __hash__ = object.__hash__

    sum, mean, max, min, prod = map(_forward, ("sum", "mean", "max", "min", "prod"))
    std, var, ptp, any, all = map(_forward, ("std", "var", "ptp", "any", "all"))
    argmax, argmin, argsort = map(_forward, ("argmax", "argmin", "argsort"))
    argpartition, searchsorted = map(_forward, ("argpartition", "searchsorted"))
    cumsum, cumprod, sort, clip = map(_forward, ("cumsum", "cumprod", "sort", "clip"))
    reshape, astype, ravel, view = map(_forward, ("reshape", "astype", "ravel", "view"))
    transpose, swapaxes, squeeze = map(_forward, ("transpose", "swapaxes", "squeeze"))
    flatten, repeat, take, choose = map(_forward, ("flatten", "repeat", "take", "choose"))
    compress, nonzero, diagonal = map(_forward, ("compress", "nonzero", "diagonal"))
    trace, dot, round, conj = map(_forward, ("trace", "dot", "round", "conj"))
    conjugate, copy, tolist = map(_forward, ("conjugate", "copy", "tolist"))
    tobytes, block_until_ready = map(_forward, ("tobytes", "block_until_ready"))
    T, mT, real, imag, at = map(_forward_property, ("T", "mT", "real", "imag", "at"))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(np.shape(self.__jax_array__()))

    @property
    def dtype(self) -> Any:
        """The data type of the value."""
        return jnp.asarray(self.__jax_array__()).dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the value.

        Raises:
            TypeError: `jax.random` was given random keys inside a distributed value.
        """
        if jax_private.is_key(self.__jax_array__()):
            # jax.random asks for it, of what it takes for the numbers that keys are made of.
            raise TypeError(
                f"jax.random was given a {type(self).__name__} value of random keys, but takes "
                "only the keys themselves: write jax.random.normal(keys.get()), or give the keys "
                "to the replicas, strategy.run(fn, args=(keys,))."
            )
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the value."""
        return self.size * self.itemsize

    def __getitem__(self, index: object) -> Any:
        return jnp.asarray(self.__jax_array__())[unwrap_index(index)]

    def __round__(self, ndigits: int = 0) -> Any:
        return self.round(ndigits)

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
        if not spec:
            return str(self)
        value = self.numpy()
        return format(value if value.ndim else value[()], spec)


jax_private.register_array_type(
    ArrayLike, lambda value: value.__jax_array__(), lambda value: value.jax_type()
)

"""What a push asks a server to do, and how that is written in a message.

The operations of a push are applied in their order, all or none. Arrays are NumPy arrays or
whatever `np.asarray` takes; a `jax.Array` on the CPU is not copied.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from distribax.types import WriteKind

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Assign:
    """Sets a parameter."""

    uid: str
    value: Any


@dataclass(frozen=True)
class AssignAdd:
    """Adds to a parameter."""

    uid: str
    delta: Any


@dataclass(frozen=True)
class Scatter:
    """Changes some rows of a parameter, or some elements, where it is.

    With indices of two dimensions, each line is the place of
    an element, or of a smaller array. What occurs twice is changed twice; of several values that
    are assigned, the last one stays.
    """

    uid: str
    kind: WriteKind
    indices: Any
    updates: Any


@dataclass(frozen=True)
class SparseGradient:
    """A gradient that is zero but for some rows; rows of an index that occurs twice are summed."""

    indices: Any
    rows: Any


Gradient: TypeAlias = "Any | SparseGradient | None"


@dataclass(frozen=True)
class Apply:
    """One contribution to an optimizer's update: a gradient for each of its targets, in order.

    A target whose gradient is None keeps its value and its slots. A `SparseGradient` changes only
    those rows of the target and of its slots: the others do not decay meanwhile ("lazy").
    `extra_args` are arrays or numbers for the transformation's `update`; of a round with several
    contributions, those of the one that completes it are used.
    """

    optimizer: str
    gradients: tuple[Gradient, ...]
    extra_args: Mapping[str, Any] = field(default_factory=dict)


Op: TypeAlias = Assign | AssignAdd | Scatter | Apply


class OpCode(enum.StrEnum):
    """What an encoded operation has under "do"."""

    ASSIGN = "assign"
    ADD = "add"
    SCATTER = "scatter"
    APPLY = "apply"


def encode(operations: Sequence[Op]) -> tuple[list[dict[str, Any]], list[Array]]:
    """Returns the operations as plain values, and the arrays that these refer to by position."""
    arrays: list[Array] = []

    def place(value: ArrayLike) -> int:
        arrays.append(np.asarray(value))
        return len(arrays) - 1

    def encode_gradient(value: Gradient) -> int | list[int] | None:
        if value is None:
            return None
        if isinstance(value, SparseGradient):
            return [place(value.indices), place(value.rows)]
        return place(value)

    def encode_one(operation: Op) -> dict[str, Any]:
        match operation:
            case Assign(uid, value):
                return {"do": OpCode.ASSIGN, "uid": uid, "value": place(value)}
            case AssignAdd(uid, value):
                return {"do": OpCode.ADD, "uid": uid, "value": place(value)}
            case Scatter(uid, kind, indices, updates):
                at = [place(indices), place(updates)]
                return {"do": OpCode.SCATTER, "uid": uid, "kind": kind.value, "rows": at}
            case Apply(optimizer, gradients, extra_args):
                return {
                    "do": OpCode.APPLY,
                    "uid": optimizer,
                    "gradients": [encode_gradient(value) for value in gradients],
                    "extra": {name: place(value) for name, value in extra_args.items()},
                }
        raise TypeError(
            f"A push cannot carry {operation!r}: expected Assign, AssignAdd, Scatter or Apply."
        )

    return [encode_one(operation) for operation in operations], arrays


def decode(encoded: Sequence[Mapping[str, Any]], arrays: Sequence[Array]) -> list[Op]:
    """Returns the operations that `encode` has written."""

    def decode_gradient(at: int | list[int] | None) -> Gradient:
        if at is None:
            return None
        return SparseGradient(arrays[at[0]], arrays[at[1]]) if isinstance(at, list) else arrays[at]

    def decode_one(item: Mapping[str, Any]) -> Op:
        uid = item["uid"]
        match OpCode(item["do"]):
            case OpCode.ASSIGN:
                return Assign(uid, arrays[item["value"]])
            case OpCode.ADD:
                return AssignAdd(uid, arrays[item["value"]])
            case OpCode.SCATTER:
                indices, updates = item["rows"]
                return Scatter(uid, WriteKind(item["kind"]), arrays[indices], arrays[updates])
            case OpCode.APPLY:
                gradients = tuple(decode_gradient(at) for at in item["gradients"])
                extra = {name: arrays[at] for name, at in item["extra"].items()}
                return Apply(uid, gradients, extra)

    return [decode_one(item) for item in encoded]

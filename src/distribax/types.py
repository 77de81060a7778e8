"""The shared words of the library: enums and options that every layer may use."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from typing_extensions import TypeIs, override

_T = TypeVar("_T")
_E = TypeVar("_E", bound="ParsedEnum")


class ParsedEnum(enum.Enum):
    """An enum whose members can be given by name, in any case."""

    @classmethod
    def parse(cls: type[_E], value: _E | str | None, argument: str) -> _E:
        """Returns the member meant by `value`, a member or its name."""
        if isinstance(value, cls):
            return value
        # A sibling's member is understood by its name: aggregations and reductions share some.
        name = value.name if isinstance(value, enum.Enum) else value
        if isinstance(name, str):
            for member in cls:
                if member.name.lower() == name.lower():
                    return member
        known = ", ".join(f"{cls.__name__}.{member.name}" for member in cls)
        raise ValueError(
            f"{argument}={value!r} is not a {cls.__name__}. Expected one of {known}, or its name "
            f"as a string, for example {argument}={next(iter(cls)).name!r}."
        )


class ReduceOp(ParsedEnum):
    """How a set of values is combined into one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Returns the reduction that a variable's aggregation means.

        Args:
            aggregation: SUM or MEAN.

        Returns:
            The reduction of the same name.

        Raises:
            ValueError: The aggregation is another one.
        """
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp[aggregation.name]
        raise ValueError(
            f"aggregation={aggregation} has no reduction; only VariableAggregation.SUM and "
            "VariableAggregation.MEAN have one."
        )


class VariableSynchronization(ParsedEnum):
    """When the copies of a distributed variable are brought together."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(ParsedEnum):
    """How the replicas' values of a variable are combined into one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3


class WriteKind(enum.Enum):
    """How a variable is written; the value is the name of the method that does it.

    The last four are for parts of a variable only.
    """

    ASSIGN = "assign"
    ASSIGN_ADD = "assign_add"
    ASSIGN_SUB = "assign_sub"
    MAX = "scatter_max"
    MIN = "scatter_min"
    MUL = "scatter_mul"
    DIV = "scatter_div"

    @override
    def __str__(self) -> str:
        return self.value


class CommunicationImplementation(ParsedEnum):
    """Which library carries the bytes between devices; AUTO lets the platform choose."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collectives; they change speed, never a result.

    Attributes:
        bytes_per_pack: Small tensors are joined into packs of at most this size before they are
            reduced. 0 sets no limit.
        timeout_seconds: How many seconds a collective over several workers may wait for one that
            is late, before all of them end. None is what DISTRIBAX_COLLECTIVE_TIMEOUT says, or
            1800. For compiled functions, the strategy's options decide.
        implementation: Which library carries the bytes.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"CommunicationOptions: bytes_per_pack={self.bytes_per_pack} is negative. "
                "Expected a number of bytes, or 0 for the default."
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                f"CommunicationOptions: timeout_seconds={self.timeout_seconds} is not positive. "
                "Expected seconds, or None for the default."
            )
        parsed = CommunicationImplementation.parse(self.implementation, "implementation")
        object.__setattr__(self, "implementation", parsed)


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`; they exist so that code moves over unchanged.

    JAX specialises a program for each shape, so no option changes a result.

    Attributes:
        experimental_enable_dynamic_batch_size: Whether batches may differ in size.
        experimental_bucketizing_dynamic_shape: Whether shapes may be rounded up.
        experimental_xla_options: Options for XLA.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


@dataclass(frozen=True)
class ValueContext:
    """What `experimental_distribute_values_from_function` tells the value function.

    Attributes:
        replica_id_in_sync_group: The index of the replica whose value is wanted.
        num_replicas_in_sync: The number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class Identity(Generic[_T]):
    """Stands for an object itself, whatever its value: equal to others for the same object.

    The object is kept alive, so that its id stays its own.
    """

    target: _T

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.target is other.target

    @override
    def __hash__(self) -> int:
        return id(self.target)


RESTARTABLE_EXIT_CODE: Final = 42
"""With this code a process ends that was told to stop and has saved: start it again."""

PEER_LOST_EXIT_CODE: Final = 43
"""With this code a worker ends that has lost another one: start all from the last checkpoint."""

COLLECTIVE_ERROR_EXIT_CODE: Final = 44
"""With this code workers end that do not make the same calls together: fix the program."""


def is_python_number(value: object) -> bool:
    """Tells whether `value` is a plain Python number, which is on no device."""
    # Not of a class derived from them, such as the index of a replica.
    return type(value) in (bool, int, float, complex)


def is_integer(value: object) -> TypeIs[int]:
    """Tells whether `value` is an integer of Python or NumPy that can name a dimension."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

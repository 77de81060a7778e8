"""`dx.ShardedVariable`: one large variable made of several, which may live on different servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.execution import frames, named_objects, overlay
from distribax.types import VariableAggregation, VariableSynchronization, WriteKind
from distribax.values import IndexedSlices, PerReplica
from distribax.variables import creation, initializers
from distribax.variables.assignment import Assignable
from distribax.variables.context_rules import Assigned
from distribax.variables.row_reads import look_up
from distribax.variables.row_writes import Array, to_array
from distribax.variables.rows import RowAccess
from distribax.variables.sharded.division import Division
from distribax.variables.variable import Variable


class ShardedVariable(RowAccess, Assignable["ShardedVariable"]):
    """Several variables that are the rows of one: the first has the first rows, and so on.

    `dx.Variable` makes one inside the scope of a `ParameterServerStrategy` whose
    `variable_partitioner` divides the variable. It is used like a `dx.Variable`; iterating over it
    gives the shards.

    Args:
        variables: The shards; their shapes may differ in the first dimension only.
        name: A name for messages and checkpoints.

    Raises:
        TypeError: `variables` is not a list of variables.
        ValueError: The shards do not have the same columns, data type and strategy.

    Example:
        >>> import distribax as dx
        >>> v = dx.ShardedVariable([dx.Variable([0.0, 1.0]), dx.Variable([2.0])])
        >>> v.shape, v.numpy().tolist(), float(v[2])
        ((3,), [0.0, 1.0, 2.0], 2.0)
    """

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        _check_shards(variables)
        self._variables = list(variables)
        self._name = name
        self._division = Division.of([variable.shape[0] for variable in self._variables])
        self._shape = (self._division.starts[-1], *self._variables[0].shape[1:])
        if self.source is not None:
            named_objects.register(_get_remote_name(self._variables), self)

    @classmethod
    def of(cls, variables: Sequence[Variable], name: str = "ShardedVariable") -> Any:
        """Returns the sharded variable that this process has of these shards, or creates one.

        Args:
            variables: The shards.
            name: The name of a new one.

        Returns:
            The sharded variable; the shard itself if there is only one.
        """
        if len(variables) == 1:
            return variables[0]
        known = named_objects.find(_get_remote_name(variables))
        return cls(variables, name) if known is None else known

    # What it is.

    @property
    def variables(self) -> list[Variable]:
        """The shards."""
        return list(self._variables)

    @property
    @override
    def row_shards(self) -> list[tuple[int, Variable]]:
        """The shards, each with the number of its first row."""
        return list(zip(self._division.starts, self._variables, strict=False))

    @property
    @override
    def states(self) -> list[Variable]:
        """The shards."""
        return self.variables

    @property
    @override
    def division(self) -> Division:
        """Which rows each shard has."""
        return self._division

    @property
    def name(self) -> str:
        """The variable's name."""
        self.note_identity()
        return self._name

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self._shape

    @property
    @override
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""
        return self._variables[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers should change the variable."""
        return self._variables[0].trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""
        return self._variables[0].synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values are combined."""
        return self._variables[0].aggregation

    @property
    def distribute_strategy(self) -> contracts.Strategy:
        """The strategy that the variable was created under."""
        return self._variables[0].distribute_strategy

    @property
    def constraint(self) -> Callable[[jax.Array], jax.typing.ArrayLike] | None:
        """The function that optimizers apply to each shard after each update, or None."""
        return self._variables[0].constraint

    @property
    def per_replica(self) -> bool:
        """Whether each replica has a value of its own."""
        return self._variables[0].per_replica

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, or servers, that have the shards."""
        return tuple(variable.device for variable in self._variables)

    @property
    @override
    def source(self) -> contracts.Source | None:
        """Where the value is fetched from if it lives in other processes, or None."""
        return self._variables[0].source

    @property
    @override
    def described(self) -> str:
        """The variable as error messages name it."""
        count = len(self._variables)
        return f"sharded variable {self._name!r} (shape {self._shape}, {count} shards)"

    # Reading.

    @override
    def read_value(self) -> jax.Array:
        """Returns the whole value as an array."""
        if self.source is not None and frames.current() is None and self._stands_alone():
            # All at once, and not one after the other.
            return jnp.concatenate(self.source.pull(self._variables))
        return jnp.concatenate([variable.read_value() for variable in self._variables])

    @override
    def numpy(self) -> np.ndarray:
        """Returns the whole value as a NumPy array of its own."""
        if self.source is not None and frames.current() is None and self._stands_alone():
            return np.concatenate([np.asarray(part) for part in self.source.pull(self._variables)])
        return np.concatenate([variable.numpy() for variable in self._variables])

    def _stands_alone(self) -> bool:
        return all(overlay.find_overlay(variable) is None for variable in self._variables)

    @override
    def __getitem__(self, index: Any) -> jax.Array:
        """Returns a part of the value; of rows that are named by numbers only those are read."""
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self._find_rows(first)
        if rows is None:
            return self.read_value()[index]
        if not others:
            return look_up(self, rows, f"{self._name}[...]")
        # The rows that were found have numbers of their own; other index arrays go along with them.
        found = look_up(self, rows.reshape(-1), f"{self._name}[...]")
        if not isinstance(first, slice):
            return found[(np.arange(rows.size).reshape(rows.shape), *others)]
        return found[(slice(None), *others)]

    def _find_rows(self, index: object) -> np.ndarray | None:
        """Returns the numbers of the rows that an index along the first dimension names."""
        count = self._shape[0]
        if isinstance(index, (bool, np.bool_)) or index is None or index is Ellipsis:
            return None
        if isinstance(index, slice):
            rows = np.arange(count)[index]
            return None if len(rows) == count else rows
        if jax_private.is_tracer(index) or not isinstance(
            index, (int, np.integer, np.ndarray, list, jax.Array)
        ):
            return None
        rows = np.asarray(index)
        if rows.dtype.kind not in "iu":
            return None
        if rows.size and not (rows.min() >= -count and rows.max() < count):
            raise IndexError(
                f"{self._name}[...]: index {rows} is not a row of {self.described}, which has the "
                f"rows 0 to {count - 1}."
            )
        return np.where(rows < 0, rows + count, rows)

    @override
    def __iter__(self) -> Iterator[Variable]:
        return iter(self._variables)

    @override
    def __len__(self) -> int:
        return self._shape[0]

    # Writing.

    @override
    def _write(self, kind: WriteKind, value: Assigned) -> ShardedVariable:
        if isinstance(value, PerReplica):
            # Whether that can be written is for the variables to say.
            parts: list[Any] = [value] * len(self._variables)
        else:
            parts = self._split(kind, to_array(value))
        for variable, part in zip(self._variables, parts, strict=True):
            variable._write(kind, part)
        return self

    def _split(self, kind: WriteKind, value: Array) -> list[Array]:
        if kind is not WriteKind.ASSIGN and value.shape == ():
            return [value] * len(self._variables)
        if value.shape != self._shape:
            raise ValueError(
                f"{kind}: a value of shape {tuple(value.shape)} does not fit {self.described}. "
                f"Expected shape {self._shape}."
            )
        return [value[rows] for rows in self._division.slices]

    # What optimizers need.

    def like(self, shards: Sequence[Variable], name: str) -> ShardedVariable:
        """Returns other variables, divided in the same way, as one.

        Args:
            shards: The variables.
            name: The name of the whole.

        Returns:
            The new sharded variable.
        """
        return ShardedVariable(shards, name)

    def divide(self, grad: Array | IndexedSlices) -> list[Any]:
        """Returns each shard's part of a gradient.

        Args:
            grad: A gradient with respect to the whole.

        Returns:
            The parts; None where a sparse gradient has no rows.
        """
        if not isinstance(grad, IndexedSlices):
            return [grad[rows] for rows in self._division.slices]
        parts: list[Any] = [None] * len(self._variables)
        values = np.asarray(grad.values)
        for shard, places, ids in self._division.split(np.asarray(grad.indices)):
            parts[shard] = IndexedSlices(values[places], ids, self._variables[shard].shape)
        return parts

    @override
    def __repr__(self) -> str:
        sizes = ", ".join(str(variable.shape[0]) for variable in self._variables)
        dtype = np.dtype(self.dtype).name
        return (
            f"<dx.ShardedVariable {self._name!r} shape={self._shape} dtype={dtype}, "
            f"{len(self._variables)} shards of {sizes} rows>"
        )

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return ShardedVariable.of, (self._variables, self._name)


def create_divided(
    create: Callable[..., Variable],
    arguments: dict[str, Any],
    partitioner: Callable[..., Sequence[int]],
) -> Variable | ShardedVariable:
    """Creates a variable, divided as `partitioner` says."""
    name = arguments.get("name") or "Variable"
    initial: Any = arguments.get("initial_value")
    dtype = arguments.get("dtype")
    shape = tuple(arguments.get("shape") or ())
    # An initializer that can make one shard at a time is called by each of them.
    makes_parts = bool(shape) and initializers.takes_part(initial)
    if makes_parts:
        # What it returns has the last word; the size is needed before.
        value_dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype or float))
    else:
        value = creation.compute_initial(initial, dtype, arguments.get("shape"), name)
        arguments = {**arguments, "initial_value": value}
        shape, value_dtype = tuple(value.shape), value.dtype
    num_shards = _count_shards(partitioner, shape, value_dtype, name) if shape else 1
    if num_shards == 1:
        return create(**arguments)

    def make_rows(rows: slice) -> Any:
        if not makes_parts:
            return np.asarray(value)[rows]
        part = initializers.ShardRange(shape, rows)
        return lambda: initializers.make_part(initial, part, dtype, name)

    common = {key: given for key, given in arguments.items() if key != "shape"}
    shards = []
    for index, rows in enumerate(Division.even(shape[0], num_shards).slices):
        own = {"initial_value": make_rows(rows), "name": f"{name}/part_{index}"}
        shards.append(create(**{**common, **own}))
    return ShardedVariable(shards, name)


def _count_shards(
    partitioner: Callable[..., Sequence[int]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    name: str,
) -> int:
    parts = partitioner(shape=shape, dtype=dtype)
    numbers = list(parts) if isinstance(parts, (list, tuple)) else []
    fits = len(numbers) == len(shape) and all(
        isinstance(number, (int, np.integer)) and number >= 1 for number in numbers
    )
    if not fits or any(number != 1 for number in numbers[1:]):
        raise ValueError(
            f"variable_partitioner: for variable {name!r} of shape {shape} it "
            f"returned {parts!r}. Expected a list with a number for each dimension, which is 1 for "
            "all but the first: variables are divided by rows, as by "
            "dx.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)."
        )
    return min(int(numbers[0]), int(shape[0]) or 1)


def _check_shards(variables: Sequence[Variable]) -> None:
    is_list = isinstance(variables, (list, tuple)) and bool(variables)
    if not is_list or not all(isinstance(variable, Variable) for variable in variables):
        raise TypeError(
            f"dx.ShardedVariable: variables={variables!r}. Expected a list of dx.Variable, with at "
            "least one."
        )
    if any(not variable.shape for variable in variables):
        raise ValueError("dx.ShardedVariable: variables has a scalar, which has no rows.")
    for what, values in (
        ("data type", [np.dtype(variable.dtype).name for variable in variables]),
        ("shape but for the first dimension", [variable.shape[1:] for variable in variables]),
        ("strategy", [type(variable.distribute_strategy).__name__ for variable in variables]),
    ):
        if len(set(values)) > 1:
            raise ValueError(
                f"dx.ShardedVariable: the variables do not have the same {what}: {values}."
            )


def _get_remote_name(variables: Sequence[Variable]) -> str:
    if variables[0].source is None:
        return ""
    return "+".join(variable.placement.specs[0].uid for variable in variables)
